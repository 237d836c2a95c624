"""Importing this module registers torch.ops.kdtree_engine.verify_attn_paged, which torch.compile takes as one node.

    import kdtree_engine.torch_ops
    out, lse = torch.ops.kdtree_engine.verify_attn_paged(q, kv_pool, qo_indptr=..., sm_scale=..., ...)

Arguments and results are those of `kdtree_engine.verify_attn_paged`, without `out`, `lse`, `workspace` and `library`:
the operator allocates its results and has no gradient. Tensors of a CUDA device run on the GPU library, in order on the
current stream; those of the CPU on the host library.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from kdtree_engine.ops import verify_attn_paged as op


# Tensors by name only are more than torch.library.custom_op can take.
def _verify_attn_paged(
    q: Tensor,
    kv_pool: Tensor,
    qo_indptr: Tensor,
    sm_scale: float,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    kv_lens: Tensor | None = None,
    page_size: int = 1,
    draft_kv: Tensor | None = None,
    draft_slots: Tensor | None = None,
    mask: Tensor | None = None,
    mask_bits: Tensor | None = None,
    parents: Tensor | None = None,
    full_mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    logit_cap: float = 0.0,
    d_latent: int = 512,
    out_dtype: str = "bfloat16",
    split_tokens: int = 0,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    skip_prefix: bool = False,
    skip_draft: bool = False,
    kernel: str = "verify_attn_flash_paged",
) -> tuple[Tensor, Tensor]:
    return op.verify_attn_paged(**locals())


_SIGNATURE = inspect.signature(_verify_attn_paged)


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Results as tensors without contents, for tracing."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    q, d_latent, out_dtype = (given.arguments[name] for name in ("q", "d_latent", "out_dtype"))
    rows = q.shape[:2]
    return q.new_empty((*rows, d_latent), dtype=getattr(torch, out_dtype)), q.new_empty(rows, dtype=torch.float32)


verify_attn_paged = torch.library.custom_op(
    "kdtree_engine::verify_attn_paged", _verify_attn_paged, mutates_args=(), device_types=("cpu", "cuda")
)
verify_attn_paged.register_fake(_fake)
