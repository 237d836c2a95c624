"""Best-first DDTree construction from a drafter's per-depth marginals, keys in float64."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from oracle.request_status import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Array = npt.NDArray[Any]


class Tree(NamedTuple):
    """A draft tree of n nodes, root first; indices are node numbers, -1 = none."""

    tokens: Array  # of token_ids' type, int32 at least [n]
    parents: Array  # int32 [n], root -1
    depths: Array  # int32 [n]
    visibility: Array  # uint8 [n, n]: ancestors and self
    first_child: Array  # int32 [n]
    next_sibling: Array  # int32 [n]
    scores: Array  # float64 [n]: cumulative log-probability, root 0
    usable_depth: int  # rows before the first bad one
    status: RequestStatus  # what is wrong with that


def tree_build(log_probs: Array, token_ids: Array, budget: int, root_token: int) -> Tree:
    """Grow the tree of the `budget` most probable prefixes below the root.

    log_probs float32 [L, K], descending along K; token_ids int [L, K], distinct within a row. A row that holds NaN or
    +inf, rises or repeats a token ends the usable depth and says so in the status; a node of log-probability -inf is
    never made. So there may be fewer than budget + 1 nodes. Equal scores are ordered by their rank tuples.
    """
    rows = np.asarray(log_probs, np.float32).astype(np.float64)
    usable_depth, status = len(rows), RequestStatus(0)
    for depth in reversed(range(len(rows))):
        if problem := _row_problem(rows[depth], token_ids[depth]):
            usable_depth, status = depth, problem
    tokens, parents, depths, scores = [root_token], [-1], [0], [0.0]
    # Items order by falling score, then by rank tuple; no two items have the same tuple.
    heap: list[tuple[float, tuple[int, ...], int]] = []

    def push(score: float, ranks: tuple[int, ...], parent: int) -> None:
        if score != -np.inf:
            heapq.heappush(heap, (-score, ranks, parent))

    if usable_depth and rows.shape[1]:
        push(rows[0, 0], (0,), 0)
    while heap and len(tokens) <= budget:
        negative, ranks, parent = heapq.heappop(heap)
        score, depth, rank = -negative, len(ranks), ranks[-1]
        node = len(tokens)
        tokens.append(int(token_ids[depth - 1, rank]))
        parents.append(parent)
        depths.append(depth)
        scores.append(score)
        if rank + 1 < rows.shape[1]:
            # Subtract, then add: the order of the two roundings is part of the definition.
            push(score - rows[depth - 1, rank] + rows[depth - 1, rank + 1], (*ranks[:-1], rank + 1), parent)
        if depth < usable_depth:
            push(score + rows[depth, 0], (*ranks, 0), node)
    first_child, next_sibling = links(parents)
    return Tree(
        np.array(tokens, np.result_type(token_ids, np.int32)),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        visibility(parents),
        first_child,
        next_sibling,
        np.array(scores),
        usable_depth,
        status,
    )


def _row_problem(row: Array, token_ids: Array) -> RequestStatus:
    status = RequestStatus(0)
    if (np.isnan(row) | np.isposinf(row)).any():
        status |= RequestStatus.NOT_A_NUMBER
    if (row[1:] > row[:-1]).any():
        status |= RequestStatus.RISING
    if len(set(token_ids.tolist())) != len(token_ids):
        status |= RequestStatus.REPEATED_TOKEN
    return status


def visibility(parents: Array | list[int]) -> Array:
    """Which nodes each node sees, uint8 [n, n]: its ancestors and itself."""
    seen = np.eye(len(parents), dtype=np.uint8)
    for node in range(1, len(parents)):
        seen[node] |= seen[parents[node]]
    return seen


def links(parents: Array | list[int]) -> tuple[Array, Array]:
    """First child and next sibling of every node, children in ascending order; -1 = none."""
    n = len(parents)
    first_child, next_sibling = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
    for node in range(n - 1, 0, -1):
        next_sibling[node] = first_child[parents[node]]
        first_child[parents[node]] = node
    return first_child, next_sibling


def positions(prefix_len: int, depths: Array) -> Array:
    """Rotary positions of the nodes: the root stands right behind the prefix."""
    return prefix_len + np.asarray(depths, np.int64)


def tree_build_batch(
    log_probs: Array,
    token_ids: Array,
    root_tokens: Array,
    *,
    max_nodes: int,
    budgets: Array | None = None,
    num_depths: Array | None = None,
    widths: Array | None = None,
    seq_lens: Array | None = None,
    build: Callable[[Array, Array, int, int], Tree] = tree_build,
) -> dict[str, Array]:
    """The trees of a batch, each padded to max_nodes by roots without children; every output of the op by its name.

    log_probs [B, L, K]; budgets, num_depths and widths [B] default to what there is room for. A request with a size
    outside of that gets its root alone.
    """
    batch, most_depths, most_ranks = log_probs.shape
    words = (max_nodes + 63) // 64
    out: dict[str, Array] = {
        name: np.zeros((batch, max_nodes), np.int64) for name in ("tokens", "depths", "positions", "retrive_index")
    }
    out |= {name: np.full((batch, max_nodes), -1) for name in ("parents", "retrive_next_token", "retrive_next_sibling")}
    out["visibility"] = np.tile(np.eye(max_nodes, dtype=np.uint8), (batch, 1, 1))
    out["num_nodes"], out["status"] = np.ones(batch, np.int32), np.zeros(batch, np.int32)
    for b in range(batch):
        budget = max_nodes - 1 if budgets is None else int(budgets[b])
        depths = most_depths if num_depths is None else int(num_depths[b])
        ranks = most_ranks if widths is None else int(widths[b])
        start = 0 if seq_lens is None else int(seq_lens[b])
        out["tokens"][b], out["positions"][b] = root_tokens[b], start
        out["retrive_index"][b] = b * max_nodes + np.arange(max_nodes)
        if not (0 <= budget < max_nodes and 0 <= depths <= most_depths and 1 <= ranks <= most_ranks):
            out["status"][b] = RequestStatus.SIZE_OUT_OF_RANGE
            continue
        tree = build(log_probs[b, :depths, :ranks], token_ids[b, :depths, :ranks], budget, int(root_tokens[b]))
        n = len(tree.tokens)
        out["tokens"][b, :n], out["parents"][b, :n], out["depths"][b, :n] = tree.tokens, tree.parents, tree.depths
        out["positions"][b, :n] = positions(start, tree.depths)
        out["visibility"][b, :n, :n] = tree.visibility
        out["retrive_next_token"][b, :n], out["retrive_next_sibling"][b, :n] = tree.first_child, tree.next_sibling
        out["num_nodes"][b], out["status"][b] = n, tree.status
    columns = np.pad(out["visibility"], ((0, 0), (0, 0), (0, words * 64 - max_nodes)))
    out["visibility_bits"] = np.packbits(columns, axis=-1, bitorder="little").view("<u8")
    return out
