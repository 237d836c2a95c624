"""Where each request's rows are, padded or ragged: what tree_accept and kv_compact have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdtree_engine.errors import KernelError
from kdtree_engine.tensors import INDEX_DTYPES, integer, put

if TYPE_CHECKING:
    from kdtree_engine.contract import Axes
    from kdtree_engine.tensors import NumpyAdaptor, TorchAdaptor


def layout(
    args: Any, adaptor: NumpyAdaptor | TorchAdaptor, axes: Axes, qo_indptr: Any, num_nodes: Any, max_q_len: int | None
) -> None:
    """Puts where each request's rows are into the arguments, once a tensor of rows has been checked.

    Without qo_indptr rows are [batch, max_q_len], with it [total_q].
    """
    if qo_indptr is None:
        args.batch, args.max_q_len = axes["batch"], axes["max_q_len"]
        if max_q_len not in (None, args.max_q_len):
            raise KernelError(
                "max_q_len", f"got {max_q_len}, expected {args.max_q_len}, the trees' width; leave it out"
            )
        args.total_q = args.batch * args.max_q_len
        put(args, adaptor, axes, "num_nodes", num_nodes, ("int32",), "batch")
        return
    if num_nodes is not None:
        raise KernelError("num_nodes", "got it beside qo_indptr, expected None; leave it out")
    put(args, adaptor, axes, "qo_indptr", qo_indptr, INDEX_DTYPES, "batch+1")
    args.qo_indptr_type = INDEX_DTYPES.index(adaptor.dtype(qo_indptr))
    if axes["batch+1"] == 0:
        raise KernelError("qo_indptr", "got shape [0], expected [batch + 1]; pass where the last request ends too")
    args.batch, args.total_q = axes["batch+1"] - 1, axes["total_q"]
    axes.check("qo_indptr", (args.batch,), "batch")
    if max_q_len is None:
        max_q_len = min(max(args.total_q, 1), 1025)
    args.max_q_len = integer("max_q_len", max_q_len, "pass the most nodes of a request")
