"""Greedy acceptance: walk the draft tree along the target's own tokens, and what is kept of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]


class Accepted(NamedTuple):
    """One request's round."""

    path: list[int]  # accepted nodes, root first
    bonus: int  # the target's token after the last of them


class GreedyOutputs(NamedTuple):
    """The outputs of SGLang's verify_tree_greedy."""

    predicts: Array  # int32 [T]: the token emitted after each accepted row, 0 elsewhere
    accept_index: Array  # int32 [B, steps]: accepted rows among all T, -1 behind them
    accept_token_num: Array  # int32 [B]: accepted drafts, the root not counted


def tree_accept(tokens: Sequence[int], parents: Sequence[int], target: Sequence[int]) -> Accepted:
    """Walk from the root: while the target's token at the present node is one of its children, go there.

    tokens, parents, target [n]: node tokens, parents (root -1), the target's token after every node. Of children with
    one token the first is taken.
    """
    path = [0]
    while True:
        here = path[-1]
        below = [i for i in range(1, len(tokens)) if parents[i] == here and tokens[i] == target[here]]
        if not below:
            return Accepted(path, int(target[here]))
        path.append(below[0])


def compact(kv: Array, node_slots: Sequence[int], path: Sequence[int]) -> tuple[Array, list[int]]:
    """Move the accepted nodes' rows to the first node slots.

    kv [num_slots, d], node_slots [n], path accepted nodes. Gives the new pool and the slots now committed.
    """
    moved = kv.copy()
    committed = [int(slot) for slot in node_slots[: len(path)]]
    for target, node in zip(committed, path, strict=True):
        moved[target] = kv[node_slots[node]]
    return moved, committed


def verify_tree_greedy(tokens: Array, parents: Array, target: Array, num_nodes: Array, steps: int) -> GreedyOutputs:
    """Accept every request of a batch, in SGLang's form; steps = the longest path that fits, root counted.

    tokens, parents, target [T] are requests one after the other, parents counted from each request's root.
    """
    predicts = np.zeros(len(tokens), np.int32)
    accept_index = np.full((len(num_nodes), steps), -1, np.int32)
    accept_token_num = np.zeros(len(num_nodes), np.int32)
    start = 0
    for b, n in enumerate(num_nodes.tolist()):
        rows = slice(start, start + n)
        path = tree_accept(tokens[rows].tolist(), parents[rows].tolist(), target[rows].tolist()).path[:steps]
        for step, node in enumerate(path):
            accept_index[b, step] = start + node
            predicts[start + node] = target[start + node]
        accept_token_num[b] = len(path) - 1
        start += n
    return GreedyOutputs(predicts, accept_index, accept_token_num)
