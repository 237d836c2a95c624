"""Op tree_build: the draft tree of the most probable prefixes, best first (DDTree).

The drafter gives marginals: row d of `log_probs` holds the candidates at depth d + 1. A prefix is a choice of candidate
ranks, its score the float64 sum of their log-probabilities:

score(first child of p)  = score(p) + log_probs[depth(p)][0]
score(next sibling of c) = score(c) - log_probs[d][rank] + log_probs[d][rank + 1]

Nodes are made in falling order of score, equal scores by the smaller rank tuple. The result is exact: the same nodes in
the same order on every device.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from kdtree_engine.contract import Axes
from kdtree_engine.errors import KernelError
from kdtree_engine.tensors import INDEX_DTYPES, NumpyAdaptor, adaptor_for, integer, library_for, put, put_outputs

if TYPE_CHECKING:
    from kdtree_engine._native import Library


class DraftTree(NamedTuple):
    """Draft trees of a batch, one padded row of max_nodes nodes a request; the root is node 0.

    Nodes behind a request's num_nodes are roots without children, with the root's token and position.
    """

    tokens: Any  # [batch, max_nodes], of token_ids' dtype
    parents: Any  # int32 [batch, max_nodes], -1 for the root
    depths: Any  # int32 [batch, max_nodes]
    positions: Any  # index_dtype [batch, max_nodes]: seq_len + depth
    visibility: Any  # uint8 [batch, max_nodes, max_nodes]: 1 for a node itself and its ancestors
    visibility_bits: Any  # uint64, with torch int64, [batch, max_nodes, words]: bit j % 64 of word j / 64
    retrive_index: Any  # index_dtype [batch, max_nodes]: the node's row among all
    retrive_next_token: Any  # index_dtype [batch, max_nodes]: first child, -1 for none
    retrive_next_sibling: Any  # index_dtype [batch, max_nodes]: -1 for none
    num_nodes: Any  # int32 [batch], the root counted
    status: Any  # int32 [batch], kdtree_request_status of kdtree/capi.h; 0 is good


_POINTERS = ("log_probs", "token_ids", "root_tokens", "budgets", "num_depths", "widths", "seq_lens", *DraftTree._fields)


class _Args(ctypes.Structure):
    """kdtree_tree_build_args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("batch", "max_depth", "max_width", "max_nodes")),
        *((name, ctypes.c_int32) for name in ("token_type", "index_type", "seq_lens_type")),
    )


_NODES = "batch max_nodes"


def _outputs(token: str, index: str, bits: tuple[str, ...]) -> dict[str, tuple[tuple[str, ...], str]]:
    """Dtypes and axes of each output."""
    return {
        "tokens": ((token,), _NODES),
        "parents": (("int32",), _NODES),
        "depths": (("int32",), _NODES),
        "positions": ((index,), _NODES),
        "visibility": (("uint8",), f"{_NODES} max_nodes"),
        "visibility_bits": (bits, f"{_NODES} words"),
        "retrive_index": ((index,), _NODES),
        "retrive_next_token": ((index,), _NODES),
        "retrive_next_sibling": ((index,), _NODES),
        "num_nodes": (("int32",), "batch"),
        "status": (("int32",), "batch"),
    }


def tree_build(
    log_probs: Any,
    token_ids: Any,
    root_tokens: Any,
    *,
    max_nodes: int,
    budgets: Any = None,
    num_depths: Any = None,
    widths: Any = None,
    seq_lens: Any = None,
    index_dtype: str = "int32",
    out: DraftTree | None = None,
    library: Library | None = None,
) -> DraftTree:
    """Grows each request's tree of its most probable prefixes.

    NumPy arrays and torch CPU tensors run on the host library; torch CUDA tensors on the GPU library, in order on
    torch's current stream, without reading the device or synchronising. What is wrong with one request sets its status
    and leaves the others alone: a row that holds NaN or +inf, rises or repeats a token ends the request's usable rows,
    a size out of range leaves its root alone.

    Args:
        log_probs: float32 [batch, max_depth, max_width], falling along a row; at most 32 depths and 64 candidates. A
            prefix with a candidate of -inf is never made.
        token_ids: int32 or int64 [batch, max_depth, max_width], distinct within a row.
        root_tokens: of the same dtype [batch].
        max_nodes: nodes a request has room for, the root counted, 1 to 1025.
        budgets: int32 [batch], nodes below the root; None: max_nodes - 1.
        num_depths: int32 [batch], rows in use; None: all.
        widths: int32 [batch], columns in use; None: all.
        seq_lens: int32 or int64 [batch], committed tokens before the root; None: 0.
        index_dtype: "int32" or "int64", of positions and retrive_*.
        out: tensors to write to; those that are None are left out, except tokens, parents, num_nodes and status. None
            allocates all.
        library: a loaded library; None takes the one for log_probs' kind.

    Returns:
        The trees; `out` when it was given.

    Raises:
        KernelError: an argument of the wrong kind, dtype, shape, stride, device or range, named by `argument`; or the
            library is missing, or the device refused the launch.
    """
    adaptor = adaptor_for("log_probs", log_probs, host=True)
    library = library_for(adaptor, log_probs, library)
    if index_dtype not in INDEX_DTYPES:
        raise KernelError("index_dtype", f"got {index_dtype!r}, expected one of {', '.join(INDEX_DTYPES)}")
    args = _Args(struct_size=ctypes.sizeof(_Args))
    args.max_nodes = integer("max_nodes", max_nodes, "pass the most nodes of a tree")
    if not 1 <= args.max_nodes <= 1025:
        raise KernelError("max_nodes", f"got {args.max_nodes}, expected 1..1025; draft smaller trees")
    axes = Axes(max_nodes=args.max_nodes, words=(args.max_nodes + 63) // 64)

    put(args, adaptor, axes, "log_probs", log_probs, ("float32",), "batch max_depth max_width", required=True)
    put(args, adaptor, axes, "token_ids", token_ids, INDEX_DTYPES, "batch max_depth max_width", required=True)
    token = adaptor.dtype(token_ids)
    put(args, adaptor, axes, "root_tokens", root_tokens, (token,), "batch", required=True)
    for name, tensor in (("budgets", budgets), ("num_depths", num_depths), ("widths", widths)):
        put(args, adaptor, axes, name, tensor, ("int32",), "batch")
    put(args, adaptor, axes, "seq_lens", seq_lens, INDEX_DTYPES, "batch")
    args.batch, args.max_depth, args.max_width = axes["batch"], axes["max_depth"], axes["max_width"]
    args.token_type, args.index_type = INDEX_DTYPES.index(token), INDEX_DTYPES.index(index_dtype)
    args.seq_lens_type = 0 if seq_lens is None else INDEX_DTYPES.index(adaptor.dtype(seq_lens))

    bits = ("uint64",) if isinstance(adaptor, NumpyAdaptor) else ("int64", "uint64")
    outputs = _outputs(token, index_dtype, bits)
    with adaptor.active():
        required = ("tokens", "parents", "num_nodes", "status")
        out = put_outputs(args, adaptor, axes, DraftTree, out, outputs, required)
        library.call("tree_build", ctypes.byref(args), ctypes.c_void_p(adaptor.stream))
    return out
