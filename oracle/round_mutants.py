"""Named wrong answers of tree_build, tree_accept and kv_compact, each the fault of a public report or of a new kernel.

They take the arguments of the batch oracles and give outputs by name. One that is about something that a case does not
have gives the right answer.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from oracle.kv_compact import kv_compact
from oracle.request_status import RequestStatus
from oracle.tree_accept import tree_accept_batch
from oracle.tree_build import Tree, links, tree_build, tree_build_batch, visibility

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Mutant = Callable[..., dict[str, Array]]

BUILD_MUTANTS: dict[str, Mutant] = {}
ACCEPT_MUTANTS: dict[str, Mutant] = {}
COMPACT_MUTANTS: dict[str, Mutant] = {}


def _build(function: Mutant) -> Mutant:
    BUILD_MUTANTS[function.__name__] = function
    return function


def _accept(function: Mutant) -> Mutant:
    ACCEPT_MUTANTS[function.__name__] = function
    return function


def _compact(function: Mutant) -> Mutant:
    COMPACT_MUTANTS[function.__name__] = function
    return function


def grow(
    log_probs: Array,
    token_ids: Array,
    budget: int,
    root_token: int,
    *,
    exact: type = np.float64,
    order: Callable[[float, tuple[int, ...], int], Any] = lambda score, ranks, _: (-score, ranks),
) -> Tree:
    """The construction with another arithmetic or another order of the heap."""
    right = tree_build(log_probs, token_ids, budget, root_token)
    rows: Array = log_probs[: right.usable_depth].astype(exact)
    nodes: list[tuple[tuple[int, ...], int]] = [((), -1)]
    heap: list[tuple[Any, int, Any, tuple[int, ...], int]] = []

    def push(score: Any, ranks: tuple[int, ...], parent: int) -> None:
        if score != -np.inf:
            heapq.heappush(
                heap, (order(score, ranks, len(nodes)), len(heap) + len(nodes) * 10_000, score, ranks, parent)
            )

    if rows.size:
        push(rows[0, 0], (0,), 0)
    while heap and len(nodes) <= budget:
        _, _, score, ranks, parent = heapq.heappop(heap)
        nodes.append((ranks, parent))
        depth, rank = len(ranks), ranks[-1]
        if rank + 1 < rows.shape[1]:
            push(score - rows[depth - 1, rank] + rows[depth - 1, rank + 1], (*ranks[:-1], rank + 1), parent)
        if depth < len(rows):
            push(score + rows[depth, 0], (*ranks, 0), len(nodes) - 1)
    parents = [parent for _, parent in nodes]
    first_child, next_sibling = links(parents)
    return right._replace(
        tokens=np.array([root_token, *(token_ids[len(ranks) - 1, ranks[-1]] for ranks, _ in nodes[1:])]),
        parents=np.array(parents),
        depths=np.array([len(ranks) for ranks, _ in nodes]),
        visibility=visibility(parents),
        first_child=first_child,
        next_sibling=next_sibling,
    )


@_build
def scores_in_float32(*arguments: Array, **options: Any) -> dict[str, Array]:
    """Permutation ties come in another order. (A GPU builder that passes every test on random marginals.)"""
    return tree_build_batch(*arguments, **options, build=lambda *a: grow(*a, exact=np.float32))


@_build
def ties_in_order_of_arrival(*arguments: Array, **options: Any) -> dict[str, Array]:
    """Equal scores are popped first in, first out."""
    return tree_build_batch(*arguments, **options, build=lambda *a: grow(*a, order=lambda score, _, __: -score))


@_build
def ties_by_depth(*arguments: Array, **options: Any) -> dict[str, Array]:
    """Of equal scores the shallower prefix comes first, so that an extension waits for its parent's siblings."""
    order = lambda score, ranks, _: (-score, len(ranks), ranks)  # noqa: E731
    return tree_build_batch(*arguments, **options, build=lambda *a: grow(*a, order=order))


@_build
def level_by_level(*arguments: Array, **options: Any) -> dict[str, Array]:
    """Nodes are sorted by depth, as EAGLE's trees are."""
    order = lambda score, ranks, _: (len(ranks), -score, ranks)  # noqa: E731
    return tree_build_batch(*arguments, **options, build=lambda *a: grow(*a, order=order))


@_build
def impossible_prefixes_made(log_probs: Array, *arguments: Array, **options: Any) -> dict[str, Array]:
    """-inf is a score like another. (A grammar's mask: the reference goes on, and then its keys are NaN.)"""
    lowest = np.where(np.isneginf(log_probs), np.float32(-1e4), log_probs)
    return tree_build_batch(lowest, *arguments, **options)


@_build
def nan_ignored(log_probs: Array, *arguments: Array, **options: Any) -> dict[str, Array]:
    """A NaN counts as the least likely candidate."""
    usual = np.where(np.isnan(log_probs), np.float32(-1e4), log_probs)
    return tree_build_batch(-np.sort(-usual, axis=-1), *arguments, **options)


@_build
def repeated_tokens_accepted(log_probs: Array, token_ids: Array, *arguments: Array, **options: Any) -> dict[str, Array]:
    """Siblings may hold the same token. (Padding: a dict keeps the last one, a walk takes the first.)"""
    distinct = np.broadcast_to(np.arange(token_ids.shape[-1]), token_ids.shape)
    out = tree_build_batch(log_probs, distinct, *arguments, **options)
    requests = np.arange(len(token_ids))[:, None]
    depth = np.maximum(out["depths"] - 1, 0)
    if token_ids.shape[1]:
        drafted = token_ids[requests, depth, np.minimum(out["tokens"], token_ids.shape[-1] - 1)]
        out["tokens"] = np.where(out["depths"] > 0, drafted, out["tokens"])
    return out


@_build
def rising_rows_accepted(log_probs: Array, *arguments: Array, **options: Any) -> dict[str, Array]:
    """The rank tells the candidate, whatever its log-probability."""
    falling = np.minimum.accumulate(np.where(np.isnan(log_probs), np.inf, log_probs), axis=-1)
    return tree_build_batch(np.where(np.isfinite(falling), falling, log_probs), *arguments, **options)


@_build
def budget_counts_the_root(*arguments: Array, **options: Any) -> dict[str, Array]:
    """A tree of `budget` nodes, the root counted."""
    budgets = options.pop("budgets", None)
    if budgets is None:
        budgets = np.full(len(arguments[0]), options["max_nodes"] - 1)
    return tree_build_batch(*arguments, **options, budgets=np.where(budgets > 0, budgets - 1, budgets))


@_build
def ragged_depths_ignored(*arguments: Array, **options: Any) -> dict[str, Array]:
    """Every request has as many rows as there is room for."""
    return tree_build_batch(*arguments, **options | {"num_depths": None})


@_build
def ragged_widths_ignored(*arguments: Array, **options: Any) -> dict[str, Array]:
    """Every row has as many candidates as there is room for."""
    return tree_build_batch(*arguments, **options | {"widths": None})


@_build
def bad_request_ends_the_batch(*arguments: Array, **options: Any) -> dict[str, Array]:
    """Requests behind a bad one get their roots alone."""
    right = tree_build_batch(*arguments, **options)
    bad = np.flatnonzero(right["status"])
    stop = np.zeros(len(arguments[0]), np.int32) + options["max_nodes"] - 1
    if options.get("budgets") is not None:
        stop = options["budgets"].copy()
    if bad.size:
        stop[bad[0] + 1 :] = 0
    return tree_build_batch(*arguments, **options | {"budgets": stop})


@_build
def positions_by_node(*arguments: Array, **options: Any) -> dict[str, Array]:
    """Rotary positions count nodes instead of depth. (vllm-ddtree: positions ignored the tree under graphs.)"""
    out = tree_build_batch(*arguments, **options)
    live = np.arange(options["max_nodes"]) < out["num_nodes"][:, None]
    out["positions"] = np.where(live, out["positions"][:, :1] + np.arange(options["max_nodes"]), out["positions"])
    return out


@_build
def positions_behind_the_root(*arguments: Array, **options: Any) -> dict[str, Array]:
    """The root is taken for a cached token."""
    out = tree_build_batch(*arguments, **options)
    return out | {"positions": out["positions"] + 1}


def _with_visibility(out: dict[str, Array], seen: Array) -> dict[str, Array]:
    nodes = seen.shape[-1]
    columns = np.pad(seen, ((0, 0), (0, 0), (0, -nodes % 64)))
    return out | {"visibility": seen, "visibility_bits": np.packbits(columns, -1, bitorder="little").view("<u8")}


@_build
def node_blind_to_itself(*arguments: Array, **options: Any) -> dict[str, Array]:
    """Ancestors only."""
    out = tree_build_batch(*arguments, **options)
    return _with_visibility(out, out["visibility"] & (1 - np.eye(options["max_nodes"], dtype=np.uint8)))


@_build
def parent_instead_of_lineage(*arguments: Array, **options: Any) -> dict[str, Array]:
    """A node sees itself and its parent."""
    out = tree_build_batch(*arguments, **options)
    seen = np.tile(np.eye(options["max_nodes"], dtype=np.uint8), (len(arguments[0]), 1, 1))
    for b, node in zip(*np.nonzero(out["parents"] >= 0), strict=True):
        seen[b, node, out["parents"][b, node]] = 1
    return _with_visibility(out, seen)


@_build
def one_word_of_bits(*arguments: Array, **options: Any) -> dict[str, Array]:
    """Nodes past 64 are lost. (SGLang's packed masks end at 32 nodes.)"""
    out = tree_build_batch(*arguments, **options)
    bits = out["visibility_bits"].copy()
    bits[..., 1:] = 0
    return out | {"visibility_bits": bits}


@_build
def youngest_child_first(*arguments: Array, **options: Any) -> dict[str, Array]:
    """Links hold the children in falling order, so that the walk meets the less likely first."""
    out = tree_build_batch(*arguments, **options)
    first, after = np.full_like(out["parents"], -1), np.full_like(out["parents"], -1)
    for b, node in zip(*np.nonzero(out["parents"] >= 0), strict=True):
        parent = out["parents"][b, node]
        after[b, node], first[b, parent] = first[b, parent], node
    return out | {"retrive_next_token": first, "retrive_next_sibling": after}


@_build
def rows_of_the_first_request(*arguments: Array, **options: Any) -> dict[str, Array]:
    """retrive_index counts within the request."""
    out = tree_build_batch(*arguments, **options)
    return out | {"retrive_index": np.broadcast_to(np.arange(options["max_nodes"]), out["retrive_index"].shape)}


@_build
def padding_hangs_below_the_root(*arguments: Array, **options: Any) -> dict[str, Array]:
    """Rows behind the nodes are children of the root. (Padding that a walk can step on.)"""
    out = tree_build_batch(*arguments, **options)
    padding = np.arange(options["max_nodes"]) >= out["num_nodes"][:, None]
    return out | {"parents": np.where(padding, 0, out["parents"])}


@_build
def full_budget_reported(*arguments: Array, **options: Any) -> dict[str, Array]:
    """num_nodes is what was asked for, though the tree was exhausted."""
    out = tree_build_batch(*arguments, **options)
    return out | {"num_nodes": np.full_like(out["num_nodes"], options["max_nodes"])}


def _parents_form(tokens: Array, options: dict[str, Any]) -> Array | None:
    """The parents, as [rows], when that form is in use."""
    return None if options.get("parents") is None else options["parents"].reshape(-1)


def _requests(tokens: Array, options: dict[str, Any]) -> list[tuple[int, int]]:
    """First row and nodes of each request whose size is right."""
    if options.get("qo_indptr") is not None:
        bounds = options["qo_indptr"]
        return [(int(a), int(b - a)) for a, b in itertools.pairwise(bounds)]
    width = tokens.shape[1]
    counts = options.get("num_nodes")
    counts = np.full(len(tokens), width) if counts is None else counts
    return [(b * width, int(n)) for b, n in enumerate(counts) if 0 <= n <= width]


@_accept
def last_of_equal_siblings(tokens: Array, **options: Any) -> dict[str, Array]:
    """Of two children with one token the later is taken. (A dict from token to child.)"""
    parents = _parents_form(tokens, options)
    if parents is None:
        return tree_accept_batch(tokens, **options)
    hidden = tokens.copy()
    flat = hidden.reshape(-1)
    for start, n in _requests(tokens, options):
        seen: set[tuple[int, int]] = set()
        for row in reversed(range(start + 1, start + n)):
            pair = (int(parents[row]), int(flat[row]))
            if pair in seen:
                flat[row] = -5
            seen.add(pair)
    return tree_accept_batch(hidden, **options)


@_accept
def first_child_only(tokens: Array, **options: Any) -> dict[str, Array]:
    """Siblings are never looked at: a tree is walked as a chain."""
    if options.get("retrive_next_sibling") is None:
        return tree_accept_batch(tokens, **options)
    links_off = np.where(options["retrive_next_sibling"] > 0, -1, options["retrive_next_sibling"])
    return tree_accept_batch(tokens, **options | {"retrive_next_sibling": links_off})


@_accept
def truncates_silently(tokens: Array, **options: Any) -> dict[str, Array]:
    """A path that does not fit is cut. (SGLang: accept_index narrower than the tree is deep.)"""
    width = options.pop("max_path", None)
    out = tree_accept_batch(tokens, **options)
    if width is None:
        return out
    out["accept_token_num"] = np.minimum(out["accept_token_num"], width - 1)
    for name in ("path", "accept_index"):
        out[name] = out[name][:, :width]
    out["path_len"] = np.minimum(out["path_len"], width)
    return out


@_accept
def bonus_of_the_parent(tokens: Array, **options: Any) -> dict[str, Array]:
    """The bonus is the target before the last accepted node, which is its token."""
    out = tree_accept_batch(tokens, **options)
    flat = tokens.reshape(-1)
    last = [row[length - 1] if length else -1 for row, length in zip(out["accept_index"], out["path_len"], strict=True)]
    return out | {"bonus": np.where(out["path_len"] > 1, flat[np.array(last)], out["bonus"])}


@_accept
def rows_within_the_request(tokens: Array, **options: Any) -> dict[str, Array]:
    """accept_index counts within the request. (SGLang 26866: the stride of later requests.)"""
    out = tree_accept_batch(tokens, **options)
    return out | {"accept_index": out["path"]}


@_accept
def root_counts_as_a_draft(tokens: Array, **options: Any) -> dict[str, Array]:
    """accept_token_num is the path's length."""
    out = tree_accept_batch(tokens, **options)
    return out | {"accept_token_num": out["path_len"]}


@_accept
def predicts_of_the_next_row(tokens: Array, **options: Any) -> dict[str, Array]:
    """Tokens stand beside the row that holds them instead of the row that predicts them."""
    out = tree_accept_batch(tokens, **options)
    return out | {"predicts": np.where(out["predicts"] > 0, tokens, out["predicts"])}


@_accept
def predicts_in_every_row(tokens: Array, **options: Any) -> dict[str, Array]:
    """Rejected rows keep their prediction."""
    out = tree_accept_batch(tokens, **options)
    return out | {"predicts": np.maximum(out["node_targets"], 0)}


@_accept
def padding_walked(tokens: Array, **options: Any) -> dict[str, Array]:
    """num_nodes is not read. (Padded draft batches of vLLM 26498.)"""
    return tree_accept_batch(tokens, **options | {"num_nodes": None})


@_accept
def bad_trees_walked(tokens: Array, **options: Any) -> dict[str, Array]:
    """A parent out of place goes unnoticed, the walk ends where it can."""
    parents = _parents_form(tokens, options)
    if parents is None:
        return tree_accept_batch(tokens, **options)
    mended = parents.copy()
    for start, n in _requests(tokens, options):
        nodes = np.arange(n)
        here = mended[start : start + n]
        here[1:] = np.where((here[1:] < 0) | (here[1:] >= nodes[1:]), nodes[1:] - 1, here[1:])
        here[:1] = -1
    return tree_accept_batch(tokens, **options | {"parents": mended})


@_accept
def higher_token_of_equals(tokens: Array, **options: Any) -> dict[str, Array]:
    """argmax gives the last of equal logits."""
    if options.get("logits") is None or options.get("uniforms") is not None:
        return tree_accept_batch(tokens, **options)
    logits = options["logits"].astype(np.float64)
    logits = np.where(logits == logits.max(axis=1, keepdims=True), logits + np.arange(logits.shape[1]) * 1e-9, logits)
    return tree_accept_batch(tokens, **options | {"logits": logits})


@_accept
def end_of_the_vocabulary_unseen(tokens: Array, **options: Any) -> dict[str, Array]:
    """What is left over of the vocabulary after whole vectors is not looked at."""
    logits = options.get("logits")
    if logits is None or logits.shape[1] % 8 == 0:
        return tree_accept_batch(tokens, **options)
    cut = logits.copy()
    cut[:, logits.shape[1] // 8 * 8 :] = -np.inf
    return tree_accept_batch(tokens, **options | {"logits": cut})


@_accept
def nan_logits_ignored(tokens: Array, **options: Any) -> dict[str, Array]:
    """A NaN never exceeds, so it is as if it were not there."""
    if options.get("logits") is None:
        return tree_accept_batch(tokens, **options)
    logits = options["logits"]
    return tree_accept_batch(tokens, **options | {"logits": np.where(np.isnan(logits), -np.inf, logits)})


@_accept
def uniform_zero_takes_the_impossible(tokens: Array, **options: Any) -> dict[str, Array]:
    """`>=` for `>`: a uniform of 0 draws the first token even if its probability is 0. (SGLang 35771.)"""
    out = tree_accept_batch(tokens, **options)
    if options.get("uniforms") is None:
        return out
    return out | {
        "node_targets": np.where((options["uniforms"] == 0) & (out["node_targets"] > 0), 0, out["node_targets"])
    }


@_accept
def temperature_multiplied(tokens: Array, **options: Any) -> dict[str, Array]:
    """softmax(logits * temperature)."""
    if options.get("uniforms") is None:
        return tree_accept_batch(tokens, **options)
    return tree_accept_batch(tokens, **options | {"temperature": 1 / options["temperature"]})


@_accept
def drawn_from_the_end(tokens: Array, **options: Any) -> dict[str, Array]:
    """The cumulative probability is summed from the last token: lossless in law, another text for a seed."""
    if options.get("uniforms") is None:
        return tree_accept_batch(tokens, **options)
    flipped = tree_accept_batch(tokens, **options | {"logits": options["logits"][:, ::-1]})
    right = tree_accept_batch(tokens, **options)
    last = options["logits"].shape[1] - 1
    targets = flipped["node_targets"]
    return right | {"node_targets": np.where(targets >= 0, last - targets, targets)}


@_accept
def bad_request_ends_the_batch_of_walks(tokens: Array, **options: Any) -> dict[str, Array]:
    """Requests behind a bad one accept nothing."""
    out = tree_accept_batch(tokens, **options)
    bad = np.flatnonzero(out["status"])
    if bad.size:
        out["path_len"][bad[0] + 1 :] = 0
        out["status"][bad[0] + 1 :] = RequestStatus.BAD_TREE
    return out


def _moved_one_by_one(pools: Array, path: Array, path_len: Array, order: int, **options: Any) -> dict[str, Array]:
    """Rows are moved in place, in the path's order or against it."""
    out = kv_compact(pools, path, path_len, **options)
    moved = pools.copy()
    for b in np.flatnonzero(out["status"] == 0):
        length = int(path_len[b])
        slots = [*out["committed_slots"][b, :length], *out["free_slots"][b, : out["num_free"][b]]]
        for k in range(length)[::order]:
            moved[:, slots[k]] = moved[:, slots[path[b, k]]]
    return out | {"pools": moved}


@_compact
def last_row_first(pools: Array, path: Array, path_len: Array, **options: Any) -> dict[str, Array]:
    """In place, from the path's end: a row is overwritten before it was moved."""
    return _moved_one_by_one(pools, path, path_len, -1, **options)


@_compact
def first_layer_only(pools: Array, path: Array, path_len: Array, **options: Any) -> dict[str, Array]:
    """The other layers keep the rejected rows."""
    out = kv_compact(pools, path, path_len, **options)
    return out | {"pools": np.concatenate([out["pools"][:1], pools[1:]])}


@_compact
def nothing_moved(pools: Array, path: Array, path_len: Array, **options: Any) -> dict[str, Array]:
    """Accepted nodes are taken for a prefix of the tree. (SGLang 15360: gibberish for top-k > 1.)"""
    return kv_compact(pools, path, path_len, **options) | {"pools": pools}


@_compact
def rows_left_where_they_are(pools: Array, path: Array, path_len: Array, **options: Any) -> dict[str, Array]:
    """The accepted nodes' own slots are committed: right by index, wrong for whole pages."""
    out = kv_compact(pools, path, path_len, **options)
    slots = np.full_like(out["committed_slots"], -1)
    for b in np.flatnonzero(out["status"] == 0):
        length = int(path_len[b])
        nodes = np.array([*out["committed_slots"][b, :length], *out["free_slots"][b, : out["num_free"][b]]])
        slots[b, :length] = nodes[path[b, :length]]
    return out | {"committed_slots": slots}


@_compact
def root_row_lost(pools: Array, path: Array, path_len: Array, **options: Any) -> dict[str, Array]:
    """The path is taken to begin with the first draft."""
    shifted = np.where(path > 0, path - 1, path)
    shifted[:, 0] = path[:, 0]
    out = kv_compact(pools, path, path_len, **options)
    wrong = pools.copy()
    for b in np.flatnonzero(out["status"] == 0):
        length = int(path_len[b])
        nodes = np.array([*out["committed_slots"][b, :length], *out["free_slots"][b, : out["num_free"][b]]])
        wrong[:, nodes[:length]] = pools[:, nodes[shifted[b, :length]]]
    return out | {"pools": wrong}


@_compact
def bonus_kept(pools: Array, path: Array, path_len: Array, **options: Any) -> dict[str, Array]:
    """One slot too few is free: that of the bonus, which has no row yet. (vLLM 26498.)"""
    out = kv_compact(pools, path, path_len, **options)
    return out | {"num_free": np.maximum(out["num_free"] - 1, 0)}


@_compact
def pages_counted_from_the_root(pools: Array, path: Array, path_len: Array, **options: Any) -> dict[str, Array]:
    """kv_lens is not added to the node's number."""
    if options.get("kv_lens") is not None:
        options["kv_lens"] = np.zeros_like(options["kv_lens"])
    return kv_compact(pools, path, path_len, **options)


@_compact
def page_size_of_one(pools: Array, path: Array, path_len: Array, **options: Any) -> dict[str, Array]:
    """Pages are taken for slots."""
    return kv_compact(pools, path, path_len, **options | {"page_size": 1})


@_compact
def padding_has_slots(pools: Array, path: Array, path_len: Array, **options: Any) -> dict[str, Array]:
    """num_nodes is not read: slots behind the nodes are freed."""
    return kv_compact(pools, path, path_len, **options | {"num_nodes": None})


@_compact
def slots_of_the_first_request(pools: Array, path: Array, path_len: Array, **options: Any) -> dict[str, Array]:
    """Every request finds its slots at the beginning."""
    slots = options.get("node_slots")
    if slots is not None and slots.ndim == 2:
        options["node_slots"] = np.broadcast_to(slots[:1], slots.shape)
    return kv_compact(pools, path, path_len, **options)


@_compact
def bad_paths_moved(pools: Array, path: Array, path_len: Array, **options: Any) -> dict[str, Array]:
    """A path that falls is followed all the same."""
    mended = path.copy()
    for row in mended:
        row[1:] = np.where(np.diff(row) <= 0, row[:-1] + 1, row[1:])
    return kv_compact(pools, mended, path_len, **options)


@_compact
def slots_outside_wrap(pools: Array, path: Array, path_len: Array, **options: Any) -> dict[str, Array]:
    """A slot that the pool does not have is taken modulo its size."""
    slots = options.get("node_slots")
    if slots is not None:
        options["node_slots"] = slots % pools.shape[1]
    return kv_compact(pools, path, path_len, **options)
