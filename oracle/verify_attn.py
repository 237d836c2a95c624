"""Tree-verify attention over a latent cache, one query row set at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


def verify_attn(
    q: Array, kv: Array, *, sm_scale: float, mask: Array | None = None, kv_len: Array | None = None, d_latent: int = 512
) -> tuple[Array, Array]:
    """Attention of q [B, q_len, H, d] to kv [B, kv_len, d], whose first d_latent columns are also the values.

    mask [B, q_len, kv_len], nonzero = visible; kv_len [B], keys in use (clamped to the width of kv).
    Gives out [B, q_len, H, d_latent] and the natural-log lse [B, q_len, H], float64. A row that sees no key has
    out 0 and lse -inf. Keys that a row does not see are never touched, whatever they hold.
    """
    batch, q_len, num_heads, _ = q.shape
    out = np.zeros((batch, q_len, num_heads, d_latent))
    lse = np.full((batch, q_len, num_heads), -np.inf)
    for b in range(batch):
        length = kv.shape[1] if kv_len is None else min(max(int(kv_len[b]), 0), kv.shape[1])
        for i in range(q_len):
            visible = np.arange(length)
            if mask is not None:
                visible = np.flatnonzero(mask[b, i, :length])
            if visible.size:
                keys = kv[b, visible].astype(np.float64)
                scores = sm_scale * (q[b, i].astype(np.float64) @ keys.T)
                peak = scores.max(axis=1, keepdims=True)
                weights = np.exp(scores - peak)
                total = weights.sum(axis=1, keepdims=True)
                out[b, i] = (weights / total) @ keys[:, :d_latent]
                lse[b, i] = (peak + np.log(total))[:, 0]
    return out, lse
