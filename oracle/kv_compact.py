"""Compaction of the cache after acceptance, with everything that can be wrong with a request."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from oracle.request_status import RequestStatus
from oracle.tree_accept import compact

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


def kv_compact(
    pools: Array,
    path: Array,
    path_len: Array,
    *,
    node_slots: Array | None = None,
    page_table: Array | None = None,
    kv_lens: Array | None = None,
    page_size: int = 1,
    qo_indptr: Array | None = None,
    num_nodes: Array | None = None,
    max_q_len: int | None = None,
) -> dict[str, Array]:
    """Every output of the op by its name, and `pools` as they are afterwards.

    pools [layers, slots, ...]; path [B, max_path]; node_slots [B, max_q_len], or with qo_indptr [T]; or a page table
    [B, columns] with kv_lens [B].
    """
    batch, max_path = path.shape
    num_slots = pools.shape[1]
    if qo_indptr is not None:
        starts, counts = qo_indptr[:-1], np.diff(qo_indptr)
        rows = node_slots.size if node_slots is not None else batch * int(max_q_len or 0)
        most = rows if max_q_len is None else max_q_len
    else:
        most = node_slots.shape[1] if node_slots is not None else int(max_q_len or 0)
        rows = batch * most
        starts, counts = np.arange(batch) * most, np.full(batch, most) if num_nodes is None else num_nodes
    out = {
        "committed_slots": np.full((batch, max_path), -1),
        "free_slots": np.full((batch, most), -1),
        "num_free": np.zeros(batch, int),
        "status": np.zeros(batch, int),
        "pools": pools.copy(),
    }
    for b in range(batch):
        start, n, length = int(starts[b]), int(counts[b]), int(path_len[b])
        if not (0 <= n <= most and 0 <= start <= rows - n):
            out["status"][b] = RequestStatus.SIZE_OUT_OF_RANGE
            continue
        if node_slots is not None:
            slots = [int(slot) for slot in node_slots.reshape(-1)[start : start + n]]
        else:
            assert page_table is not None
            assert kv_lens is not None
            slots = [_slot(page_table[b], int(kv_lens[b]) + node, page_size) for node in range(n)]
        steps = path[b, : max(length, 0)].tolist()
        rises = all(a < c for a, c in itertools.pairwise(steps))
        good = 0 <= length <= min(n, max_path) and rises and (not steps or (steps[0] == 0 and steps[-1] < n))
        status = RequestStatus(0) if good else RequestStatus.BAD_PATH
        if not all(0 <= slot < num_slots for slot in slots):
            status |= RequestStatus.BAD_SLOT
        out["status"][b] = status
        if status:
            continue
        for layer in range(len(pools)):
            out["pools"][layer] = compact(out["pools"][layer], slots, steps)[0]
        out["committed_slots"][b, :length] = slots[:length]
        out["free_slots"][b, : n - length] = slots[length:]
        out["num_free"][b] = n - length
    return out


def _slot(pages: Array, token: int, page_size: int) -> int:
    """A token's slot, -1 where the table does not reach it or names no page."""
    if not 0 <= token // page_size < len(pages) or pages[token // page_size] < 0:
        return -1
    return int(pages[token // page_size]) * page_size + token % page_size
