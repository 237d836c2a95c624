"""Op verify_attn: tree-verify attention over a dense latent cache, float32.

s[b,i,h,j]   = sm_scale * <q[b,i,h,:], kv[b,j,:]>       over the keys j that node i sees
lse[b,i,h]   = log(sum_j exp(s[b,i,h,j]))               natural logarithm
out[b,i,h,:] = sum_j exp(s[b,i,h,j] - lse[b,i,h]) kv[b,j,:d_latent]
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from kdtree_engine.contract import Axes
from kdtree_engine.tensors import adaptor_for, integer, library_for, number

if TYPE_CHECKING:
    from kdtree_engine._native import Library

# The tolerances of the op, for float32 accumulation of float32 inputs against the float64 oracle on the same inputs.
#
# A score is a sum of 576 products, an output a weighted sum of up to kv_len values; both are sums of partial sums, so
# their rounding errors behave like a random walk of at most a few hundred steps of 2^-24 and stay near 1e-6 relative.
# The relative error of a row's weights is the absolute error of its scores, which grows with their size: peaked rows
# (scores in the tens) are an order of magnitude above flat ones. 1e-5 leaves that order and no more.
OUT_ROW_REL_L2 = 1e-5
# lse is a maximum plus the logarithm of a sum: its error is the absolute error of the largest scores, which is
# 2^-24 * |s| times the same small walk, below 1e-5 for the |s| <= 60 that models and tests have.
LSE_ABS = 1e-5


class _Args(ctypes.Structure):
    """kdtree_verify_attn_args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("q", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
        ("batch", ctypes.c_int64),
        ("q_len", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("kv_len", ctypes.c_int64),
        ("d_latent", ctypes.c_int64),
        ("d_rope", ctypes.c_int64),
        ("split_tokens", ctypes.c_int64),
        ("sm_scale", ctypes.c_float),
    )


def verify_attn(
    q: Any,
    kv: Any,
    *,
    sm_scale: float,
    mask: Any = None,
    kv_len: Any = None,
    d_latent: int = 512,
    split_tokens: int = 0,
    kernel: str = "verify_attn_flash",
    out: Any = None,
    lse: Any = None,
    library: Library | None = None,
) -> tuple[Any, Any]:
    """Attention of every tree node over its request's keys.

    NumPy arrays run on the host library; torch CUDA tensors on the GPU library, in order on torch's current stream and
    without synchronising. A row that sees no key gives 0 and -inf.

    Args:
        q: absorbed queries, float32 [batch, q_len, num_heads, d_latent + d_rope].
        kv: latent cache rows [latent | rope], float32 [batch, kv_len, d_latent + d_rope]; the value is the latent.
        sm_scale: softmax scale, yarn factor included; finite and > 0.
        mask: nonzero or True where a node sees a key, uint8 or bool [batch, q_len, kv_len]; None: it sees all.
        kv_len: keys in use, int32 [batch]; keys at and past it are never read. None: all.
        d_latent: width of the latent part; d_rope is the rest. One of 512/64, 512/0, 256/64, 256/32.
        split_tokens: keys a block walks alone, a multiple of 64; 0 lets the library choose from the shapes.
        kernel: a kernel of this op; `kdtree-engine kernels` lists them.
        out: float32 [batch, q_len, num_heads, d_latent] to write to; None allocates.
        lse: float32 [batch, q_len, num_heads] to write to; None allocates.
        library: a loaded library; None takes the one for q's kind.

    Returns:
        out and lse (natural logarithm).

    Raises:
        KernelError: an argument of the wrong kind, dtype, shape, stride, device or range, named by `argument`; or the
            library is missing, or the device refused the launch.
    """
    adaptor = adaptor_for("q", q)
    library = library_for(adaptor, q, library)
    library.kernel(kernel, "verify_attn")

    axes = Axes(d_latent=d_latent)
    tensors: list[tuple[str, Any, tuple[str, ...], str]] = [
        ("q", q, ("float32",), "batch q_len num_heads d_qk"),
        ("kv", kv, ("float32",), "batch kv_len d_qk"),
        ("mask", mask, ("uint8", "bool"), "batch q_len kv_len"),
        ("kv_len", kv_len, ("int32",), "batch"),
        ("out", out, ("float32",), "batch q_len num_heads d_latent"),
        ("lse", lse, ("float32",), "batch q_len num_heads"),
    ]
    for name, tensor, dtypes, names in tensors:
        if tensor is not None:
            adaptor.check(name, tensor, dtypes, writes=name in ("out", "lse"))
            axes.check(name, tuple(tensor.shape), names)
    sm_scale = number("sm_scale", sm_scale, "pass the model's softmax scale")
    split_tokens = integer("split_tokens", split_tokens, "0 lets the library choose")
    rows = (axes["batch"], axes["q_len"], axes["num_heads"])

    args = _Args(
        struct_size=ctypes.sizeof(_Args),
        q=adaptor.pointer(q),
        kv=adaptor.pointer(kv),
        mask=None if mask is None else adaptor.pointer(mask),
        kv_lens=None if kv_len is None else adaptor.pointer(kv_len),
        batch=axes["batch"],
        q_len=axes["q_len"],
        num_heads=axes["num_heads"],
        kv_len=axes["kv_len"],
        d_latent=d_latent,
        d_rope=axes["d_qk"] - d_latent,
        split_tokens=split_tokens,
        sm_scale=sm_scale,
    )
    with adaptor.active():
        workspace_size = ctypes.c_size_t()
        library.call("verify_attn_workspace_size", ctypes.byref(args), ctypes.byref(workspace_size))
        workspace = adaptor.empty((workspace_size.value,), "uint8")
        out = adaptor.empty((*rows, d_latent), "float32") if out is None else out
        lse = adaptor.empty(rows, "float32") if lse is None else lse
        args.out = adaptor.pointer(out)
        args.lse = adaptor.pointer(lse)
        args.workspace = adaptor.pointer(workspace)
        args.workspace_size = workspace_size.value
        library.call(kernel, ctypes.byref(args), ctypes.c_void_p(adaptor.stream))
    return out, lse
