"""Merge of attention results over disjoint sets of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from oracle.verify_attn_paged import floats

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


def merge_partials(outs: Array, lses: Array) -> tuple[Array, Array]:
    """The result over all keys from outs [parts, ..., d_latent] and their natural-log lses [parts, ...].

    bfloat16 comes as uint16 bits, or as floats. Gives out [..., d_latent] and lse [...], float64. A part with lse -inf
    saw nothing and is not touched, whatever it holds; a row without any other part has out 0 and lse -inf.
    """
    seen = lses > -np.inf
    exact = lses.astype(np.float64)
    peak = exact.max(axis=0)
    weights = np.exp(np.where(seen, exact - np.where(np.isneginf(peak), 0.0, peak), -np.inf))
    total = weights.sum(axis=0)
    some = total > 0
    shares = weights / np.where(some, total, 1.0)
    out: Array = (shares[..., None] * np.where(seen[..., None], floats(outs), 0.0)).sum(axis=0)
    return out, np.where(some, peak + np.log(np.where(some, total, 1.0)), -np.inf)
