"""Op verify_attn_paged: tree-verify attention over a paged latent cache, bfloat16, ragged batches.

Request b has n = qo_indptr[b + 1] - qo_indptr[b] tree nodes and a prefix of cached tokens; its key rows are those of
the prefix and one draft row a node. A node sees the whole prefix and the nodes that its mask names:

s[t,h,j]   = sm_scale * <q[t,h,:], k[j,:]>, capped as logit_cap * tanh(s / logit_cap) where logit_cap > 0
lse[t,h]   = log(sum_j exp(s[t,h,j]))                 natural logarithm
out[t,h,:] = sum_j exp(s[t,h,j] - lse[t,h]) k[j,:d_latent]
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from kdtree_engine.contract import Axes
from kdtree_engine.errors import KernelError
from kdtree_engine.tensors import NumpyAdaptor, TorchAdaptor, adaptor_for, integer, library_for, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kdtree_engine._native import Library

# The tolerances of the op, for bfloat16 inputs and output against the float64 oracle on the same inputs.
#
# Two roundings to bfloat16 (unit 2^-8) stand between them: of the softmax weights before they multiply the values, and
# of the output. Each leaves 1.66e-3 of a row's length on average, together 2.4e-3; the rest is for small requests.
OUT_REL_L2 = 4e-3
# For a row by itself. A weight is moved by at most 2^-8 of it, and since the divisor is the sum of the weights as they
# were rounded, only differences between their errors count: at worst of two equally heavy keys with orthogonal values,
# one rounded up and one down, which moves the row by 2^-8. Rounding the output moves no element by more than 2^-8, and
# the rms over a row of 256 or more by less than 2^-9. (Of 2,400 simulated rows at each of 24 shapes the worst: 4.0e-3.)
OUT_ROW_REL_L2 = 2.0**-8 + 2.0**-9
# lse takes the weights before they are rounded; its error is that of the largest scores. Tensor cores cut the running
# sum off after every step, by 2^-24 of it on average. A score is made of four quarters of at most nine steps each, so
# that 9 * 2^-24 of its size is lost where all quarters have its sign: 3.2e-5 for the |s| <= 60 of models and tests.
LSE_ABS = 9 * 2.0**-24 * 60

_POINTERS = (
    "q",
    "kv_pool",
    "draft_kv",
    "draft_slots",
    "qo_indptr",
    "kv_indptr",
    "kv_indices",
    "kv_lens",
    "visibility",
    "mask_indptr",
    "out",
    "lse",
    "workspace",
)
_SIZES = (
    "batch",
    "total_q",
    "max_q_len",
    "num_heads",
    "d_latent",
    "d_rope",
    "q_stride_token",
    "q_stride_head",
    "kv_stride",
    "draft_kv_stride",
    "num_slots",
    "page_size",
    "num_kv_indices",
    "page_table_stride",
    "mask_stride",
    "mask_size",
    "split_tokens",
    "max_kv_len",
)
_INTS = (
    "qo_indptr_type",
    "kv_indptr_type",
    "kv_indices_type",
    "kv_lens_type",
    "draft_slots_type",
    "visibility_type",
    "out_type",
    "skip_prefix",
    "skip_draft",
)


class _Args(ctypes.Structure):
    """kdtree_verify_attn_paged_args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("workspace_size", ctypes.c_size_t),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in _INTS),
        ("sm_scale", ctypes.c_float),
        ("logit_cap", ctypes.c_float),
    )


_INDEX_DTYPES = ("int32", "int64")
_OUT_DTYPES = ("bfloat16", "float32")
# kdtree_visibility and dtypes of each form of the mask.
_VISIBILITY = {
    "mask": (1, ("uint8", "bool")),
    "mask_bits": (2, ("uint64", "int64")),
    "parents": (3, ("int32",)),
    "full_mask": (4, ("uint8", "bool")),
}
_Adaptor = NumpyAdaptor | TorchAdaptor


def _rows(adaptor: _Adaptor, name: str, tensor: Any, width: int) -> tuple[int, int]:
    """Number of rows of `width` elements in a tensor [..., width], and the stride between them, in elements."""
    shape, strides = tuple(tensor.shape), adaptor.strides(tensor)
    if len(shape) not in (2, 3) or shape[-1] != width:
        raise KernelError(name, f"got shape {list(shape)}, expected [rows, {width}] or [pages, page_size, {width}]")
    if strides[-1] != 1:
        raise KernelError(name, f"got strides {strides}, expected rows without gaps between elements; copy it")
    if len(shape) == 2 or shape[0] == 1:
        return shape[0] * (1 if len(shape) == 2 else shape[1]), strides[-2]
    if shape[1] == 1:
        return shape[0], strides[0]
    if strides[0] != shape[1] * strides[1]:
        raise KernelError(name, f"got strides {strides}, expected pages that follow each other without a gap; copy it")
    return shape[0] * shape[1], strides[1]


def _index(adaptor: _Adaptor, args: _Args, field: str, name: str, tensor: Any) -> None:
    """Puts an index array and its type into the arguments."""
    adaptor.check(name, tensor, _INDEX_DTYPES)
    setattr(args, field, adaptor.pointer(tensor))
    setattr(args, f"{field}_type", _INDEX_DTYPES.index(adaptor.dtype(tensor)))


def _only(names: str, **arguments: Any) -> str | None:
    """The name of the one argument that is given, None when none is; `KernelError` when several are."""
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) > 1:
        raise KernelError(given[1], f"got it beside {given[0]}, expected one {names}; leave one out")
    return given[0] if given else None


def _keys(
    adaptor: _Adaptor, args: _Args, axes: Axes, kv_indptr: Any, kv_indices: Any, page_table: Any, kv_lens: Any
) -> None:
    """Puts the way to the prefix into the arguments: kv_indptr and kv_indices, or page_table and kv_lens."""
    form = _only("of kv_indptr and page_table", kv_indptr=kv_indptr, page_table=page_table)
    if form is None:
        raise KernelError("kv_indptr", "got None, expected kv_indptr and kv_indices, or page_table and kv_lens")
    partner, wanted, other = (
        (kv_indices, "kv_indices", kv_lens) if form == "kv_indptr" else (kv_lens, "kv_lens", kv_indices)
    )
    if partner is None:
        raise KernelError(wanted, f"got None, expected an index array beside {form}")
    if other is not None:
        name = "kv_lens" if form == "kv_indptr" else "kv_indices"
        raise KernelError(name, f"got it beside {form}, expected None; leave it out")
    if form == "kv_indptr":
        _index(adaptor, args, "kv_indptr", "kv_indptr", kv_indptr)
        _index(adaptor, args, "kv_indices", "kv_indices", kv_indices)
        axes.check("kv_indptr", tuple(kv_indptr.shape), "batch+1")
        axes.check("kv_indices", tuple(kv_indices.shape), "num_kv_indices")
    else:
        adaptor.check("page_table", page_table, _INDEX_DTYPES, dense=False)
        _index(adaptor, args, "kv_lens", "kv_lens", kv_lens)
        axes.check("kv_lens", tuple(kv_lens.shape), "batch")
        axes.check("page_table", tuple(page_table.shape), "batch num_kv_indices")
        stride, step = adaptor.strides(page_table)
        if step != 1 and axes["num_kv_indices"] > 1:
            raise KernelError("page_table", f"got strides {(stride, step)}, expected rows without gaps; copy it")
        args.kv_indices = adaptor.pointer(page_table)
        args.kv_indices_type = _INDEX_DTYPES.index(adaptor.dtype(page_table))
        args.page_table_stride = max(stride, axes["num_kv_indices"])
    args.num_kv_indices = axes["num_kv_indices"]


def _mask(adaptor: _Adaptor, args: _Args, axes: Axes, forms: dict[str, Any], mask_indptr: Any) -> None:
    """Puts what the nodes see of each other into the arguments."""
    form = _only("form of the mask", **forms)
    if form is not None:
        args.visibility_type, dtypes = _VISIBILITY[form]
        tensor = forms[form]
        adaptor.check(form, tensor, dtypes)
        args.visibility = adaptor.pointer(tensor)
        if form == "mask_bits":
            axes.check(form, tuple(tensor.shape), "total_q words")
            args.mask_stride = axes["words"]
        elif form == "parents":
            axes.check(form, tuple(tensor.shape), "total_q")
        else:
            args.mask_size = _elements(tensor.shape)
    if mask_indptr is not None:
        adaptor.check("mask_indptr", mask_indptr, ("int64",))
        axes.check("mask_indptr", tuple(mask_indptr.shape), "batch+1")
        args.mask_indptr = adaptor.pointer(mask_indptr)


def _elements(shape: Sequence[int]) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return elements


def verify_attn_paged(
    q: Any,
    kv_pool: Any,
    *,
    qo_indptr: Any,
    sm_scale: float,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    page_table: Any = None,
    kv_lens: Any = None,
    page_size: int = 1,
    draft_kv: Any = None,
    draft_slots: Any = None,
    mask: Any = None,
    mask_bits: Any = None,
    parents: Any = None,
    full_mask: Any = None,
    mask_indptr: Any = None,
    logit_cap: float = 0.0,
    d_latent: int = 512,
    out_dtype: str = "bfloat16",
    split_tokens: int = 0,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    skip_prefix: bool = False,
    skip_draft: bool = False,
    kernel: str = "verify_attn_flash_paged",
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    library: Library | None = None,
) -> tuple[Any, Any]:
    """Attention of every tree node over its request's prefix and the nodes that it sees.

    NumPy arrays (bfloat16 as uint16) and torch CPU tensors run on the host library; torch CUDA tensors on the GPU
    library, in order on torch's current stream, without reading the device or synchronising, so that the call may be
    captured into a CUDA graph. Sizes are capacities: rows of q, out and lse that belong to no request are neither read
    nor written. A row that sees no key gives 0 and -inf.

    Args:
        q: absorbed queries, bfloat16 [total_q, num_heads, d_latent + d_rope], any strides that are multiples of 8.
        kv_pool: latent cache rows [latent | rope], bfloat16 [num_slots, d_latent + d_rope], or with pages as
            [num_pages, page_size, d_latent + d_rope]; the value is the latent. Any stride between slots.
        qo_indptr: first row of each request in q, int32 or int64 [batch + 1].
        sm_scale: softmax scale, yarn factor included; finite and > 0.
        kv_indptr: first entry of each request in kv_indices, int32 or int64 [batch + 1].
        kv_indices: slots of the prefix tokens, int32 or int64 [num_kv_indices].
        page_table: instead of those two, the pages of each request in order, int32 or int64 [batch, max_pages].
        kv_lens: with page_table, tokens in each request's prefix, int32 or int64 [batch].
        page_size: slots of a page: 16, 32, 64, 128 or 256 with page_table, else 1.
        draft_kv: the drafts' rows, bfloat16 [total_q, d_latent + d_rope] or [total_q, 1, d_latent + d_rope].
        draft_slots: instead of draft_kv, their slots in the pool, int32 or int64 [total_q].
        mask: nonzero or True where a node sees a node, uint8 or bool: n x n a request, one after the other.
        mask_bits: the same as bits, uint64 or int64 [total_q, words]: bit j % 64 of word j / 64.
        parents: the same as a tree, int32 [total_q]: parent node within the request, negative for a root.
        full_mask: uint8 or bool, n x (prefix + n) a request; the prefix columns are not read.
        mask_indptr: first element of each request in mask or full_mask, int64 [batch + 1]; None: without gaps. Of the
            forms of the mask at most one is given; none is a causal chain.
        logit_cap: tanh cap of the scores; 0 is none.
        d_latent: width of the latent part; d_rope is the rest. One of 512/64, 512/0, 256/64, 256/32.
        out_dtype: "bfloat16" or "float32".
        split_tokens: keys a block walks alone, a multiple of 16; 0: chosen on the device from the whole batch. When it
            is fixed, a request's bits depend on itself, max_q_len and num_heads alone.
        max_q_len: the most nodes of a request; a request with more is left out. None: min(total_q, 256).
        max_kv_len: the longest prefix; it sizes the workspace with split_tokens (longer ones are then split more
            coarsely) and is a hint otherwise. None: 0, for no hint.
        skip_prefix: leave the prefix out.
        skip_draft: leave the drafts out.
        kernel: a kernel of this op; `kdtree-engine kernels` lists them.
        out: out_dtype [total_q, num_heads, d_latent] to write to; None allocates.
        lse: float32 [total_q, num_heads] to write to; None allocates.
        workspace: uint8 or float32 of at least `verify_attn_paged_workspace_size` bytes; None allocates.
        library: a loaded library; None takes the one for q's kind.

    Returns:
        out and lse (natural logarithm).

    Raises:
        KernelError: an argument of the wrong kind, dtype, shape, stride, device or range, named by `argument`; or the
            library is missing, or the device refused the launch.
    """
    adaptor = adaptor_for("q", q, host=True)
    library = library_for(adaptor, q, library)
    library.kernel(kernel, "verify_attn_paged")
    if out_dtype not in _OUT_DTYPES:
        raise KernelError("out_dtype", f"got {out_dtype!r}, expected one of {', '.join(_OUT_DTYPES)}")

    adaptor.check("q", q, ("bfloat16",), dense=False)
    axes = Axes(d_latent=d_latent)
    axes.check("q", tuple(q.shape), "total_q num_heads d_qk")
    total_q, num_heads, width = axes["total_q"], axes["num_heads"], axes["d_qk"]
    q_strides = adaptor.strides(q)
    if q_strides[-1] != 1:
        raise KernelError("q", f"got strides {q_strides}, expected rows without gaps between elements; copy it")
    args = _Args(struct_size=ctypes.sizeof(_Args), q=adaptor.pointer(q))
    args.total_q, args.num_heads = total_q, num_heads
    args.d_latent, args.d_rope = d_latent, width - d_latent
    args.q_stride_token, args.q_stride_head = q_strides[:2]

    adaptor.check("kv_pool", kv_pool, ("bfloat16",), dense=False)
    args.kv_pool = adaptor.pointer(kv_pool)
    args.num_slots, args.kv_stride = _rows(adaptor, "kv_pool", kv_pool, width)
    args.page_size = integer("page_size", page_size, "pass the pool's page size")
    _index(adaptor, args, "qo_indptr", "qo_indptr", qo_indptr)
    axes.check("qo_indptr", tuple(qo_indptr.shape), "batch+1")
    args.batch = axes["batch+1"] - 1
    axes.check("qo_indptr", (args.batch,), "batch")
    _keys(adaptor, args, axes, kv_indptr, kv_indices, page_table, kv_lens)

    if not skip_draft and _only("of draft_kv and draft_slots", draft_kv=draft_kv, draft_slots=draft_slots) is None:
        raise KernelError("draft_kv", "got None, expected draft_kv or draft_slots; or pass skip_draft")
    if draft_kv is not None:
        adaptor.check("draft_kv", draft_kv, ("bfloat16",), dense=False)
        rows, args.draft_kv_stride = _rows(adaptor, "draft_kv", draft_kv, width)
        axes.check("draft_kv", (rows,), "total_q")
        args.draft_kv = adaptor.pointer(draft_kv)
    if draft_slots is not None:
        _index(adaptor, args, "draft_slots", "draft_slots", draft_slots)
        axes.check("draft_slots", tuple(draft_slots.shape), "total_q")
    forms = {"mask": mask, "mask_bits": mask_bits, "parents": parents, "full_mask": full_mask}
    _mask(adaptor, args, axes, forms, mask_indptr)
    if out is not None:
        adaptor.check("out", out, (out_dtype,), writes=True)
        axes.check("out", tuple(out.shape), "total_q num_heads d_latent")
    if lse is not None:
        adaptor.check("lse", lse, ("float32",), writes=True)
        axes.check("lse", tuple(lse.shape), "total_q num_heads")

    args.sm_scale = number("sm_scale", sm_scale, "pass the model's softmax scale")
    args.logit_cap = number("logit_cap", logit_cap, "0 is no cap")
    _capacities(args, split_tokens, max_q_len, max_kv_len)
    args.out_type = _OUT_DTYPES.index(out_dtype)
    args.skip_prefix, args.skip_draft = int(bool(skip_prefix)), int(bool(skip_draft))
    with adaptor.active():
        if workspace is None:
            workspace = adaptor.empty((_workspace_size(library, args),), "uint8")
        else:
            adaptor.check("workspace", workspace, ("uint8", "float32"), writes=True)
        out = adaptor.empty((total_q, num_heads, d_latent), out_dtype) if out is None else out
        lse = adaptor.empty((total_q, num_heads), "float32") if lse is None else lse
        args.out, args.lse = adaptor.pointer(out), adaptor.pointer(lse)
        args.workspace = adaptor.pointer(workspace)
        args.workspace_size = _elements(workspace.shape) * (4 if adaptor.dtype(workspace) == "float32" else 1)
        library.call(kernel, ctypes.byref(args), ctypes.c_void_p(adaptor.stream))
    return out, lse


def _capacities(args: _Args, split_tokens: int, max_q_len: int | None, max_kv_len: int | None) -> None:
    args.split_tokens = integer("split_tokens", split_tokens, "0 lets the device choose")
    if max_q_len is None:
        max_q_len = min(max(args.total_q, 1), 256)
    args.max_q_len = integer("max_q_len", max_q_len, "pass the most nodes of a request")
    args.max_kv_len = 0 if max_kv_len is None else integer("max_kv_len", max_kv_len, "pass the longest prefix")


def _workspace_size(library: Library, args: _Args) -> int:
    size = ctypes.c_size_t()
    library.call("verify_attn_paged_workspace_size", ctypes.byref(args), ctypes.byref(size))
    return size.value


def verify_attn_paged_workspace_size(
    *,
    batch: int,
    total_q: int,
    num_heads: int,
    d_latent: int = 512,
    d_rope: int = 64,
    split_tokens: int = 0,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    library: Library,
) -> int:
    """Bytes of workspace that a call with these capacities needs on the library's current device.

    Raises:
        KernelError: a capacity out of range, named by `argument`.
    """
    args = _Args(struct_size=ctypes.sizeof(_Args), batch=batch, total_q=total_q, num_heads=num_heads)
    args.d_latent, args.d_rope = d_latent, d_rope
    _capacities(args, split_tokens, max_q_len, max_kv_len)
    return _workspace_size(library, args)
