"""Acceptance: walk the draft tree along the target's own tokens, and what is kept of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from oracle.request_status import RequestStatus

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


def tree_accept_links(
    tokens: Sequence[int], first_child: Sequence[int], next_sibling: Sequence[int], target: Sequence[int]
) -> Accepted:
    """The same walk along links: first child and next sibling of every node, -1 = none."""
    path = [0]
    while True:
        child = first_child[path[-1]]
        while child != -1 and tokens[child] != target[path[-1]]:
            child = next_sibling[child]
        if child == -1:
            return Accepted(path, int(target[path[-1]]))
        path.append(child)


def tree_problem(parents: Sequence[int]) -> RequestStatus:
    """BAD_TREE unless node 0 is a root and every other node comes after its parent."""
    good = all(parent < 0 if node == 0 else 0 <= parent < node for node, parent in enumerate(parents))
    return RequestStatus(0) if good else RequestStatus.BAD_TREE


def links_problem(first_child: Sequence[int], next_sibling: Sequence[int]) -> RequestStatus:
    """BAD_TREE unless every link leads to a later node, or is -1."""
    n = len(first_child)
    good = all(
        link == -1 or node < link < n for links in (first_child, next_sibling) for node, link in enumerate(links)
    )
    return RequestStatus(0) if good else RequestStatus.BAD_TREE


def argmax(logits: Array) -> int | None:
    """The most probable token of logits [V], of equals the lowest; None when there is a NaN among them."""
    return None if np.isnan(logits).any() else int(np.argmax(logits))


def law(logits: Array, temperature: float) -> Array:
    """softmax(logits / temperature) of logits [V], in float64; 0 where it is 2^126 times less than at the largest."""
    scaled = np.asarray(logits, np.float64) / temperature
    weights: Array = np.exp(scaled - scaled.max())
    weights[weights < 2.0**-126] = 0.0
    weights /= weights.sum()
    return weights


def draw(logits: Array, uniform: float, temperature: float) -> int | None:
    """The first token whose cumulative probability exceeds `uniform`; None when there is no law or no such uniform."""
    if np.isnan(logits).any() or not np.isfinite(np.max(logits)) or not 0 <= uniform < 1:
        return None
    probabilities = law(logits, temperature)
    exceeding = np.flatnonzero((np.cumsum(probabilities) > uniform) & (probabilities > 0))
    return int(exceeding[0]) if exceeding.size else int(np.flatnonzero(probabilities)[-1])


def accept(
    tokens: Sequence[int],
    tree: Sequence[Sequence[int]],
    target: Sequence[int | None],
    max_path: int,
) -> tuple[Accepted, RequestStatus]:
    """One request with everything that can be wrong with it; a bad one accepts nothing and has bonus -1.

    tokens [n]; tree: its parents [n] alone, or first children and next siblings; a target is None where there is none
    to be had.
    """
    status = tree_problem(*tree) if len(tree) == 1 else links_problem(*tree)
    if any(token is None for token in target):
        status |= RequestStatus.NOT_A_NUMBER
    if status or not len(tokens):
        return Accepted([], -1), status
    known = [int(token or 0) for token in target]
    if len(tree) == 1:
        accepted = tree_accept(tokens, tree[0], known)
    else:
        accepted = tree_accept_links(tokens, tree[0], tree[1], known)
    if len(accepted.path) > max_path:
        return Accepted([], -1), RequestStatus.PATH_TOO_LONG
    return accepted, status


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


def tree_accept_batch(
    tokens: Array,
    *,
    parents: Array | None = None,
    retrive_next_token: Array | None = None,
    retrive_next_sibling: Array | None = None,
    qo_indptr: Array | None = None,
    num_nodes: Array | None = None,
    target_tokens: Array | None = None,
    logits: Array | None = None,
    uniforms: Array | None = None,
    temperature: float = 1.0,
    max_q_len: int | None = None,
    max_path: int | None = None,
) -> dict[str, Array]:
    """Every output of the op by its name. tokens [B, max_q_len], or with qo_indptr [T]; logits [T, V] as floats."""
    rows = tokens.size
    if qo_indptr is None:
        batch, max_q_len = tokens.shape
        starts = np.arange(batch) * max_q_len
        counts = np.full(batch, max_q_len) if num_nodes is None else num_nodes
    else:
        batch = len(qo_indptr) - 1
        starts, counts = qo_indptr[:-1], np.diff(qo_indptr)
    most = rows if max_q_len is None else max_q_len
    width = most if max_path is None else max_path
    links = (parents,) if parents is not None else (retrive_next_token, retrive_next_sibling)
    tree = [np.asarray(link).reshape(-1) for link in links]
    flat = tokens.reshape(-1)
    given = None if target_tokens is None else target_tokens.reshape(-1)
    coins = None if uniforms is None else uniforms.reshape(-1)

    def target_of(row: int) -> int | None:
        if given is not None:
            return int(given[row])
        assert logits is not None
        return argmax(logits[row]) if coins is None else draw(logits[row], float(coins[row]), temperature)

    out: dict[str, Array] = {
        "path": np.full((batch, width), -1),
        "path_len": np.zeros(batch, int),
        "bonus": np.full(batch, -1),
        "node_targets": np.full(rows, -1),
        "accept_index": np.full((batch, width), -1),
        "accept_token_num": np.zeros(batch, int),
        "predicts": np.zeros(rows, int),
        "status": np.zeros(batch, int),
    }
    for b in range(batch):
        start, n = int(starts[b]), int(counts[b])
        if not (0 <= n <= most and 0 <= start <= rows - n):
            out["status"][b] = RequestStatus.SIZE_OUT_OF_RANGE
            continue
        here = slice(start, start + n)
        target = [target_of(row) for row in range(start, start + n)]
        out["node_targets"][here] = [-1 if token is None else token for token in target]
        accepted, status = accept(flat[here].tolist(), [link[here].tolist() for link in tree], target, width)
        out["status"][b] = status
        if status:
            continue
        length = len(accepted.path)
        out["path"][b, :length], out["path_len"][b], out["bonus"][b] = accepted.path, length, accepted.bonus
        out["accept_index"][b, :length] = [start + node for node in accepted.path]
        out["accept_token_num"][b] = max(length - 1, 0)
        for node in accepted.path:
            out["predicts"][start + node] = target[node]
    return out | {name: out[name].reshape(tokens.shape) for name in ("node_targets", "predicts")}
