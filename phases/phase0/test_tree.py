"""Tree construction against brute force, its edge cases, and acceptance against the definition."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.request_status import RequestStatus
from oracle.tree_accept import compact, tree_accept, verify_tree_greedy
from oracle.tree_build import Tree, links, positions, tree_build, visibility


def marginals(seed: int, depth: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((depth, ranks)) * 2
    log_probs = np.sort(logits - np.log(np.exp(logits).sum(1, keepdims=True)), axis=1)[:, ::-1]
    token_ids = np.stack([rng.permutation(1000)[:ranks] for _ in range(depth)])
    return log_probs.astype(np.float32), token_ids.astype(np.int32)


def prefixes(tree: Tree, token_ids: np.ndarray) -> list[tuple[int, ...]]:
    """Every node but the root as the tuple of ranks that leads to it."""
    ranks: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree.tokens)):
        parent = ranks[tree.parents[node]]
        ranks.append((*parent, token_ids[len(parent)].tolist().index(tree.tokens[node])))
    return ranks[1:]


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force_over_all_prefixes(seed: int) -> None:
    depth, ranks, budget = 3, 4, seed % 20
    log_probs, token_ids = marginals(seed, depth, ranks)
    exact = log_probs.astype(np.float64)
    everything = [
        (-sum(exact[d, r] for d, r in enumerate(prefix)), prefix)
        for length in range(1, depth + 1)
        for prefix in itertools.product(range(ranks), repeat=length)
    ]
    tree = tree_build(log_probs, token_ids, budget, 5)
    # Random marginals have no ties, so the order is that of the scores.
    assert prefixes(tree, token_ids) == [prefix for _, prefix in sorted(everything)[:budget]]


@pytest.mark.parametrize("seed", range(20))
def test_nodes_come_in_falling_score_parents_first(seed: int) -> None:
    log_probs, token_ids = marginals(seed, 5, 6)
    tree = tree_build(log_probs, token_ids, 40, 5)
    assert (np.diff(tree.scores[1:]) <= 0).all()
    assert tree.parents[0] == -1
    assert (tree.parents[1:] < np.arange(1, 41)).all()
    np.testing.assert_array_equal(tree.depths[1:], tree.depths[tree.parents[1:]] + 1)
    np.testing.assert_array_equal(tree.visibility.sum(axis=1), tree.depths + 1)
    np.testing.assert_array_equal(positions(7, tree.depths), 7 + tree.depths)


def float32_build(log_probs: np.ndarray, budget: int) -> list[tuple[int, ...]]:
    """The same construction with scores in float32: what a GPU builder must not do."""
    heap: list[tuple[Any, tuple[int, ...]]] = [(-log_probs[0, 0], (0,))]
    popped: list[tuple[int, ...]] = []
    while heap and len(popped) < budget:
        negative, ranks = heapq.heappop(heap)
        popped.append(ranks)
        depth, rank = len(ranks), ranks[-1]
        if rank + 1 < log_probs.shape[1]:
            sibling = -negative - log_probs[depth - 1, rank] + log_probs[depth - 1, rank + 1]
            heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1)))
        if depth < len(log_probs):
            heapq.heappush(heap, (negative - log_probs[depth, 0], (*ranks, 0)))
    return popped


def test_permutation_ties_need_float64() -> None:
    """Identical rows make many prefixes with one multiset of ranks, equal but for rounding: float32 reorders them."""
    differing = 0
    for seed in range(40):
        row, token_ids = marginals(seed, 1, 8)
        log_probs = np.repeat(np.float32(4) * row, 15, axis=0)
        tree = tree_build(log_probs, np.repeat(token_ids, 15, axis=0), 256, 5)
        nodes = prefixes(tree, np.repeat(token_ids, 15, axis=0))
        differing += nodes != float32_build(log_probs, 256)
        # The float64 order is right: summing every prefix anew in float64 gives non-increasing scores to within
        # the rounding of fifteen additions of numbers below 200.
        again = np.array([sum(float(log_probs[0, r]) for r in ranks) for ranks in nodes])
        assert (np.diff(again) <= 15 * 200 * 2.0**-52).all()
    assert differing > 0


def test_equal_scores_go_by_rank_tuple() -> None:
    # Two ranks of one score at every depth: all prefixes of a length tie.
    log_probs = np.full((2, 2), np.log(np.float32(0.5)), np.float32)
    token_ids = np.array([[10, 11], [20, 21]], np.int32)
    nodes = prefixes(tree_build(log_probs, token_ids, 6, 5), token_ids)
    assert nodes == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_certain_tokens_tie_prefix_before_extension() -> None:
    log_probs = np.array([[0.0, -1.0], [0.0, -1.0]], np.float32)
    token_ids = np.array([[1, 2], [3, 4]], np.int32)
    nodes = prefixes(tree_build(log_probs, token_ids, 6, 5), token_ids)
    assert nodes == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


@pytest.mark.parametrize(("depth", "budget"), [(0, 5), (3, 0)])
def test_root_alone(depth: int, budget: int) -> None:
    log_probs, token_ids = marginals(1, depth, 4) if depth else (np.zeros((0, 4)), np.zeros((0, 4), int))
    tree = tree_build(log_probs, token_ids, budget, 5)
    assert tree.tokens.tolist() == [5]
    assert tree.visibility.tolist() == [[1]]


def test_one_rank_is_a_chain() -> None:
    log_probs, token_ids = marginals(1, 6, 1)
    tree = tree_build(log_probs, token_ids, 4, 5)
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]
    np.testing.assert_array_equal(tree.visibility, np.tril(np.ones((5, 5))))


def test_an_exhausted_tree_is_smaller_than_its_budget() -> None:
    log_probs, token_ids = marginals(1, 2, 3)
    assert len(tree_build(log_probs, token_ids, 100, 5).tokens) == 1 + 3 + 9


def test_minus_infinity_is_never_a_node() -> None:
    log_probs, token_ids = marginals(1, 3, 4)
    log_probs[0, 2:] = log_probs[1, 1:] = log_probs[2, 3:] = -np.inf
    tree = tree_build(log_probs, token_ids, 100, 5)
    assert len(tree.tokens) == 1 + 2 + 2 * 1 + 2 * 1 * 3
    assert np.isfinite(tree.scores).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_that_is_not_a_distribution_ends_the_depth(bad: float, row: int) -> None:
    log_probs, token_ids = marginals(1, 3, 4)
    log_probs[row, 0] = bad
    tree = tree_build(log_probs, token_ids, 100, 5)
    assert tree.usable_depth == row
    assert RequestStatus.NOT_A_NUMBER in tree.status
    assert tree.depths.max() == row


def test_a_row_that_rises_or_repeats_ends_the_depth() -> None:
    log_probs, token_ids = marginals(1, 3, 4)
    rising = np.concatenate([log_probs[:1], log_probs[1:, ::-1]])
    tree = tree_build(rising, token_ids, 5, 5)
    assert (tree.usable_depth, tree.status) == (1, RequestStatus.RISING)
    token_ids[2, 3] = token_ids[2, 0]
    tree = tree_build(log_probs, token_ids, 100, 5)
    assert (tree.usable_depth, tree.status) == (2, RequestStatus.REPEATED_TOKEN)
    assert tree.depths.max() == 2
    # Of several bad rows the first counts.
    assert tree_build(rising, token_ids, 5, 5).status == RequestStatus.RISING


trees = st.integers(1, 24).flatmap(
    lambda n: st.tuples(*[st.integers(0, i - 1) if i else st.just(-1) for i in range(n)]).map(list)
)


@given(trees)
def test_links_name_every_child_once_in_order(parents: list[int]) -> None:
    first_child, next_sibling = links(parents)
    for node in range(len(parents)):
        children, at = [], first_child[node]
        while at != -1:
            children.append(int(at))
            at = next_sibling[at]
        assert children == [i for i, parent in enumerate(parents) if parent == node]


@given(trees)
def test_visibility_is_ancestors_and_self(parents: list[int]) -> None:
    seen = visibility(parents)
    for node in range(len(parents)):
        branch, at = {node}, node
        while at > 0:
            at = parents[at]
            branch.add(at)
        assert set(np.flatnonzero(seen[node]).tolist()) == branch


@given(trees, st.data())
def test_accepted_path_is_the_longest_that_agrees(parents: list[int], data: st.DataObject) -> None:
    n = len(parents)
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    target = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    path, bonus = tree_accept(tokens, parents, target)
    # By the definition: every step agrees, nothing could follow, and of equal siblings the first was taken.
    assert path[0] == 0
    for here, there in itertools.pairwise(path):
        agreeing = [i for i in range(n) if parents[i] == here and tokens[i] == target[here]]
        assert there == agreeing[0]
    assert not [i for i in range(1, n) if parents[i] == path[-1] and tokens[i] == target[path[-1]]]
    assert bonus == target[path[-1]]


def test_batch_outputs_in_serving_form() -> None:
    """Request 0 stops at its root; request 1 accepts 0, 2, 3 in a tree whose accepted nodes are scattered."""
    parents = np.array([-1, 0, 0, 2, -1, 0, 0, 2])
    tokens = np.array([7, 10, 11, 12, 7, 10, 11, 12])
    target = np.array([99, 0, 0, 0, 11, 0, 12, 55])
    result = verify_tree_greedy(tokens, parents, target, np.array([4, 4]), steps=4)
    assert result.accept_index.tolist() == [[0, -1, -1, -1], [4, 6, 7, -1]]
    assert result.accept_token_num.tolist() == [0, 2]
    assert result.predicts.tolist() == [99, 0, 0, 0, 11, 0, 12, 55]


def test_a_short_index_truncates_the_path() -> None:
    result = verify_tree_greedy(np.array([1, 2, 3]), np.array([-1, 0, 1]), np.array([2, 3, 4]), np.array([3]), steps=2)
    assert result.accept_index.tolist() == [[0, 1]]
    assert result.accept_token_num.tolist() == [1]


def test_compaction_moves_rows_to_the_first_node_slots() -> None:
    kv = np.arange(12.0)[:, None]
    node_slots = [9, 2, 11, 4, 0]
    moved, committed = compact(kv, node_slots, [0, 2, 4])
    assert committed == [9, 2, 11]
    assert moved[committed, 0].tolist() == [9, 11, 0]
    untouched = [i for i in range(12) if i not in committed]
    np.testing.assert_array_equal(moved[untouched], kv[untouched])
