"""Best-first DDTree construction from a drafter's per-depth marginals, keys in float64."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


class Tree(NamedTuple):
    """A draft tree of n nodes, root first; indices are node numbers, -1 = none."""

    tokens: Array  # int32 [n]
    parents: Array  # int32 [n], root -1
    depths: Array  # int32 [n]
    visibility: Array  # uint8 [n, n]: ancestors and self
    first_child: Array  # int32 [n]
    next_sibling: Array  # int32 [n]
    scores: Array  # float64 [n]: cumulative log-probability, root 0
    usable_depth: int  # rows before the first that holds NaN or +inf


def tree_build(log_probs: Array, token_ids: Array, budget: int, root_token: int) -> Tree:
    """Grow the tree of the `budget` most probable prefixes below the root.

    log_probs float32 [L, K], descending along K; token_ids int [L, K], distinct within a row. A row with NaN or +inf
    ends the usable depth; a node of log-probability -inf is never made. So there may be fewer than budget + 1 nodes.
    Equal scores are ordered by their rank tuples. ValueError on a rising row or a repeated token.
    """
    rows = np.asarray(log_probs, np.float32).astype(np.float64)
    usable_depth = _usable_depth(rows)
    for depth in range(usable_depth):
        if (rows[depth, 1:] > rows[depth, :-1]).any():
            raise ValueError(f"log_probs: row {depth} rises; expected descending values")
        if len(set(token_ids[depth].tolist())) != token_ids.shape[1]:
            raise ValueError(f"token_ids: row {depth} repeats a token; expected distinct tokens")
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
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        visibility(parents),
        first_child,
        next_sibling,
        np.array(scores),
        usable_depth,
    )


def _usable_depth(rows: Array) -> int:
    bad = np.flatnonzero((np.isnan(rows) | np.isposinf(rows)).any(axis=1))
    return int(bad[0]) if bad.size else len(rows)


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
    return np.asarray(prefix_len + np.asarray(depths))
