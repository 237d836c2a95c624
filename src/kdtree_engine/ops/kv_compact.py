"""Op kv_compact: after acceptance, the accepted nodes' cache rows move to the request's first node slots.

pool[layer][slot(k)] = pool[layer][slot(path[k])]   for k < path_len, in all layers at once

The first path_len node slots are then committed, the others free. Nothing but committed rows is written.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from kdtree_engine.contract import Axes
from kdtree_engine.errors import KernelError
from kdtree_engine.ops.layout import layout
from kdtree_engine.tensors import (
    INDEX_DTYPES,
    NumpyAdaptor,
    TorchAdaptor,
    adaptor_for,
    integer,
    library_for,
    put,
    put_outputs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kdtree_engine._native import Library


class Compaction(NamedTuple):
    """What a request keeps and gives back."""

    committed_slots: Any  # of node_slots' dtype [batch, max_path]: where the accepted rows are now, -1 behind
    free_slots: Any  # of node_slots' dtype [batch, max_q_len]: slots without a row, -1 behind
    num_free: Any  # int32 [batch]
    status: Any  # int32 [batch], kdtree_request_status of kdtree/capi.h; 0 is good


_POINTERS = (
    "pool",
    "layer_pools",
    "node_slots",
    "page_table",
    "kv_lens",
    "qo_indptr",
    "num_nodes",
    "path",
    "path_len",
    *Compaction._fields,
)
_SIZES = (
    "batch",
    "total_q",
    "max_q_len",
    "max_path",
    "num_layers",
    "num_slots",
    "row_bytes",
    "slot_stride",
    "layer_stride",
    "page_size",
    "page_table_columns",
    "page_table_stride",
)


class _Args(ctypes.Structure):
    """kdtree_kv_compact_args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in ("slots_type", "kv_lens_type", "qo_indptr_type")),
    )


_Adaptor = NumpyAdaptor | TorchAdaptor


def pool_addresses(pools: Sequence[Any]) -> Any:
    """The addresses of separate layers as a tensor beside them, int64 [num_layers]: made once, `kv_compact` takes it.

    Raises:
        KernelError: no layers, or something that is no tensor.
    """
    if not len(pools):
        raise KernelError("pools", "got no layers, expected one tensor a layer; pass the cache's")
    adaptor = adaptor_for("pools", pools[0], host=True)
    for pool in pools:
        adaptor.check("pools", pool, (adaptor.dtype(pools[0]),), writes=True, dense=False)
    addresses = adaptor.empty((len(pools),), "int64")
    for layer, pool in enumerate(pools):
        addresses[layer] = adaptor.pointer(pool)
    return addresses


def _rows(adaptor: _Adaptor, pool: Any, layers: int) -> tuple[int, int, int]:
    """Slots, bytes of a row and bytes between rows of a tensor of `layers` axes, then slots, then a row."""
    shape, strides, item = tuple(pool.shape)[layers:], adaptor.strides(pool)[layers:], adaptor.itemsize(pool)
    if not shape:
        raise KernelError("pools", f"got shape {list(pool.shape)}, expected [num_layers, num_slots, ...]; reshape it")
    dense = 1
    for size, stride in zip(shape[:0:-1], strides[:0:-1], strict=True):
        if stride != dense and size > 1 and 0 not in pool.shape:  # the library has its own words for empty pools
            raise KernelError("pools", f"got strides {strides}, expected rows without gaps between elements; copy it")
        dense *= size
    return shape[0], dense * item, (strides[0] if shape[0] > 1 and 0 not in pool.shape else dense) * item


def _pools(args: _Args, adaptor: _Adaptor, pools: Any, addresses: Any) -> Any:
    """Puts the layers into the arguments; gives what must live until the call."""
    if not isinstance(pools, list | tuple):
        if addresses is not None:
            raise KernelError("addresses", "got them beside one tensor of all layers, expected None; leave them out")
        adaptor.check("pools", pools, (adaptor.dtype(pools),), writes=True, dense=False)
        args.num_slots, args.row_bytes, args.slot_stride = _rows(adaptor, pools, 1)
        args.num_layers = pools.shape[0]
        args.layer_stride = adaptor.strides(pools)[0] * adaptor.itemsize(pools)
        args.pool = adaptor.pointer(pools)
        return pools
    args.num_slots, args.row_bytes, args.slot_stride = _rows(adaptor, pools[0], 0)
    for layer, pool in enumerate(pools):
        adaptor.check("pools", pool, (adaptor.dtype(pools[0]),), writes=True, dense=False)
        if _rows(adaptor, pool, 0) != (args.num_slots, args.row_bytes, args.slot_stride):
            raise KernelError("pools", f"layer {layer} has another shape or strides than layer 0; pass equal tensors")
    args.num_layers = len(pools)
    if addresses is None:
        addresses = pool_addresses(pools)
    put(args, adaptor, Axes(num_layers=len(pools)), "layer_pools", addresses, ("int64",), "num_layers")
    return addresses


def _pages(args: _Args, adaptor: _Adaptor, axes: Axes, page_table: Any, kv_lens: Any, page_size: int) -> None:
    adaptor.check("page_table", page_table, INDEX_DTYPES, dense=False)
    axes.check("page_table", tuple(page_table.shape), "batch columns")
    stride, step = adaptor.strides(page_table)
    if step != 1 and axes["columns"] > 1:
        raise KernelError("page_table", f"got strides {(stride, step)}, expected rows without gaps; copy it")
    put(args, adaptor, axes, "kv_lens", kv_lens, INDEX_DTYPES, "batch", required=True)
    args.kv_lens_type = INDEX_DTYPES.index(adaptor.dtype(kv_lens))
    args.page_table = adaptor.pointer(page_table)
    args.page_table_columns = axes["columns"]
    args.page_table_stride = stride if axes["batch"] > 1 else axes["columns"]
    args.page_size = integer("page_size", page_size, "pass the pool's page size")


def kv_compact(
    pools: Any,
    path: Any,
    path_len: Any,
    *,
    node_slots: Any = None,
    page_table: Any = None,
    kv_lens: Any = None,
    page_size: int = 1,
    qo_indptr: Any = None,
    num_nodes: Any = None,
    max_q_len: int | None = None,
    addresses: Any = None,
    out: Compaction | None = None,
    library: Library | None = None,
) -> Compaction:
    """Moves the accepted rows of every request and layer, in place, and says which slots are committed and free.

    NumPy arrays and torch CPU tensors run on the host library; torch CUDA tensors on the GPU library, in order on
    torch's current stream, without reading the device or synchronising. What is wrong with one request sets its status;
    it then moves, commits and frees nothing, and the others are left alone.

    Args:
        pools: the cache, of any dtype: [num_layers, num_slots, ...] with dense rows and any strides between slots and
            layers, or a list of equal tensors [num_slots, ...], one a layer.
        path: accepted nodes, int32 [batch, max_path], rising from the root; as tree_accept gives it.
        path_len: int32 [batch].
        node_slots: the pool's slot of every node, int32 or int64: [batch, max_q_len], or with qo_indptr [total_q]. The
            slots of all nodes differ.
        page_table: instead of node_slots, the pages of each request in order, int32 or int64 [batch, max_pages]; node i
            is token kv_lens + i.
        kv_lens: with page_table, cached tokens before the root, int32 or int64 [batch].
        page_size: with page_table, slots of a page.
        qo_indptr: first row of each request, int32 or int64 [batch + 1].
        num_nodes: without qo_indptr, nodes of each request, int32 [batch]; None: all.
        max_q_len: the most nodes of a request; needed with page_table, else that of node_slots.
        addresses: with a list of pools, `pool_addresses` of it; None makes them, which waits for the device.
        out: tensors to write to; all but status may be None. None allocates.
        library: a loaded library; None takes the one for pools' kind.

    Returns:
        Slots and statuses; `out` when it was given.

    Raises:
        KernelError: an argument of the wrong kind, dtype, shape, stride, device or range, named by `argument`; or the
            library is missing, or the device refused the launch.
    """
    separate = isinstance(pools, list | tuple)
    if separate and not pools:
        raise KernelError("pools", "got no layers, expected one tensor a layer; pass the cache's")
    first = pools[0] if separate else pools
    adaptor = adaptor_for("pools", first, host=True)
    library = library_for(adaptor, first, library)
    args = _Args(struct_size=ctypes.sizeof(_Args))
    axes = Axes()
    put(args, adaptor, axes, "path", path, ("int32",), "batch max_path", required=True)
    put(args, adaptor, axes, "path_len", path_len, ("int32",), "batch", required=True)
    args.max_path = axes["max_path"]
    if (node_slots is None) == (page_table is None):
        raise KernelError("node_slots", "expected either node_slots or page_table with kv_lens; pass one of them")
    if node_slots is not None:
        rows = "batch max_q_len" if qo_indptr is None else "total_q"
        put(args, adaptor, axes, "node_slots", node_slots, INDEX_DTYPES, rows)
        if kv_lens is not None:
            raise KernelError("kv_lens", "got it beside node_slots, expected None; leave it out")
    else:
        _pages(args, adaptor, axes, page_table, kv_lens, page_size)
        most = integer("max_q_len", max_q_len, "pass the most nodes of a request beside page_table")
        axes.check("max_q_len", (axes["batch"] * most,), "total_q")
        if qo_indptr is None:
            axes.check("max_q_len", (most,), "max_q_len")
    slots = adaptor.dtype(page_table if node_slots is None else node_slots)
    args.slots_type = INDEX_DTYPES.index(slots)
    layout(args, adaptor, axes, qo_indptr, num_nodes, max_q_len)
    axes.check("path", (args.batch,), "batch")
    if qo_indptr is not None:
        axes.check("max_q_len", (args.max_q_len,), "max_q_len")

    outputs = {
        "committed_slots": ((slots,), "batch max_path"),
        "free_slots": ((slots,), "batch max_q_len"),
        "num_free": (("int32",), "batch"),
        "status": (("int32",), "batch"),
    }
    with adaptor.active():
        alive = _pools(args, adaptor, pools, addresses)
        out = put_outputs(args, adaptor, axes, Compaction, out, outputs, ("status",))
        library.call("kv_compact", ctypes.byref(args), ctypes.c_void_p(adaptor.stream))
        del alive
    return out
