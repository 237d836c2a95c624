"""Op merge_partials: attention results over disjoint sets of keys become the result over all of them.

lse[...]   = log(sum_p exp(lses[p,...]))                       natural logarithm
out[...,:] = sum_p exp(lses[p,...] - lse[...]) outs[p,...,:]
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

from kdtree_engine.contract import Axes
from kdtree_engine.errors import KernelError
from kdtree_engine.tensors import adaptor_for, library_for

if TYPE_CHECKING:
    from kdtree_engine._native import Library

# The tolerances of the op, by the type of out, against the float64 oracle on the same inputs.
#
# A float32 row is a weighted sum of up to 1,024 parts. Its rounding errors are a random walk of as many steps of 2^-24,
# 2e-6 of the row, and a weight adds the error of its exponential, a few 2^-24; 1e-5 leaves the worst row of many some
# room. Rounded to bfloat16, an element moves by at most 2^-8 of itself, and so does the row.
OUT_ROW_REL_L2 = {"float32": 1e-5, "bfloat16": 2.0**-8 + 1e-5}
# lse is a maximum plus the logarithm of a sum: two roundings of 2^-24 |lse|, 7e-6 together for |lse| <= 60, and less
# than 1e-6 for the logarithm of a sum whose relative error is 2e-6 at worst.
LSE_ABS = 1e-5

_FLOAT_TYPES = {"bfloat16": 0, "float32": 1}


class _Args(ctypes.Structure):
    """kdtree_merge_partials_args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("outs", ctypes.c_void_p),
        ("lses", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("d_latent", ctypes.c_int64),
        ("in_type", ctypes.c_int32),
        ("out_type", ctypes.c_int32),
    )


def merge_partials(
    outs: Any,
    lses: Any,
    *,
    out_dtype: str | None = None,
    out: Any = None,
    lse: Any = None,
    library: Library | None = None,
) -> tuple[Any, Any]:
    """Joins the results of parts of the keys, such as those of ranks that each hold a part of the context.

    NumPy arrays (bfloat16 as uint16 bits) and torch CPU tensors run on the host library; torch CUDA tensors on the GPU
    library, in order on torch's current stream and without synchronising. A part with lse -inf saw nothing and is not
    read; a row without any other part gives 0 and -inf. Parts are added in order: a row's bits depend on its own parts
    alone.

    Args:
        outs: the parts' outputs, bfloat16 or float32 [parts, ..., d_latent], dense; 1 to 1024 parts, d_latent 256 or
            512, any axes of rows between them.
        lses: their natural logarithms, float32 [parts, ...].
        out_dtype: "bfloat16" or "float32"; None: that of `out`, or of outs.
        out: out_dtype [..., d_latent] to write to, apart from outs; None allocates.
        lse: float32 [...] to write to; None allocates.
        library: a loaded library; None takes the one for outs' kind.

    Returns:
        out and lse (natural logarithm).

    Raises:
        KernelError: an argument of the wrong kind, dtype, shape, stride, device or range, named by `argument`; or the
            library is missing, or the device refused the launch.
    """
    adaptor = adaptor_for("outs", outs, host=True)
    library = library_for(adaptor, outs, library)
    if out_dtype is not None and out_dtype not in _FLOAT_TYPES:
        raise KernelError("out_dtype", f"got {out_dtype!r}, expected bfloat16 or float32; None takes that of outs")

    axes = Axes()
    rows = " ".join(f"row{i}" for i in range(len(outs.shape) - 2))
    tensors: list[tuple[str, Any, tuple[str, ...], str]] = [
        ("outs", outs, tuple(_FLOAT_TYPES), f"parts {rows} d_latent"),
        ("lses", lses, ("float32",), f"parts {rows}"),
        ("out", out, tuple(_FLOAT_TYPES) if out_dtype is None else (out_dtype,), f"{rows} d_latent"),
        ("lse", lse, ("float32",), rows),
    ]
    for name, tensor, dtypes, names in tensors:
        if tensor is not None or name == "lses":
            adaptor.check(name, tensor, dtypes, writes=name in ("out", "lse"))
            axes.check(name, tuple(tensor.shape), names)
    if out_dtype is None:
        out_dtype = adaptor.dtype(outs if out is None else out)
    shape = tuple(lses.shape[1:])

    with adaptor.active():
        out = adaptor.empty((*shape, axes["d_latent"]), out_dtype) if out is None else out
        lse = adaptor.empty(shape, "float32") if lse is None else lse
        args = _Args(
            struct_size=ctypes.sizeof(_Args),
            outs=adaptor.pointer(outs),
            lses=adaptor.pointer(lses),
            out=adaptor.pointer(out),
            lse=adaptor.pointer(lse),
            num_parts=axes["parts"],
            num_rows=math.prod(shape),
            d_latent=axes["d_latent"],
            in_type=_FLOAT_TYPES[adaptor.dtype(outs)],
            out_type=_FLOAT_TYPES[out_dtype],
        )
        library.call("merge_partials", ctypes.byref(args), ctypes.c_void_p(adaptor.stream))
    return out, lse
