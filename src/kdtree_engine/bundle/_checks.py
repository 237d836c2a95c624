"""What a bundle must be, beyond what its types say; fixtures/README.md gives the reasons."""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from kdtree_engine.bundle._data import Expected, Request, datasets, refuse, spec_of, to_json

if TYPE_CHECKING:
    from kdtree_engine.bundle._data import Array, Bundle, Spec

ORIGINS = ("captured", "synthetic")
MODELS = ("tiny_model", "seeded", "none")
MAX_NODES = 256
MAX_KEYS = 262_144
MAX_HEADS = 128
MAX_JSON_BYTES = 16 << 10

_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,63}")


def validate(bundle: Bundle) -> None:
    """Check a bundle in memory against everything that fixtures/README.md demands; BundleError names what fails."""
    _check_scalars(bundle)
    sizes = _check_requests(bundle)
    _check_arrays(bundle, sizes)
    for b in range(bundle.batch):
        _check_tree(bundle, b)
    _check_slots(bundle)
    _check_values(bundle)
    if bundle.expected is not None:
        _check_expected(bundle, bundle.expected)


def _check_scalars(bundle: Bundle) -> None:
    if not isinstance(bundle.name, str) or not _NAME.fullmatch(bundle.name):
        refuse("name", f"{bundle.name!r} is not a bundle name; use 1..64 of a-z, 0-9 and _")
    ranges = {
        "page_size": (1, 1 << 16),
        "num_slots": (1, 1 << 31),
        "num_heads": (1, MAX_HEADS),
        "d_latent": (1, 4096),
        "d_rope": (0, 4096),
    }
    for name, (low, high) in ranges.items():
        value = getattr(bundle, name)
        if not isinstance(value, int) or not low <= value <= high:
            refuse(name, f"got {value!r}; expected an integer in {low}..{high}")
    if bundle.num_slots % bundle.page_size:
        refuse("num_slots", f"got {bundle.num_slots}; expected a multiple of page_size = {bundle.page_size}")
    if not isinstance(bundle.sm_scale, float) or not 0 < bundle.sm_scale < math.inf:
        refuse("sm_scale", f"got {bundle.sm_scale!r}; expected a positive finite number")
    if bundle.origin not in ORIGINS:
        refuse("origin", f"got {bundle.origin!r}; expected one of {', '.join(ORIGINS)}")
    if bundle.model not in MODELS:
        refuse("model", f"got {bundle.model!r}; expected one of {', '.join(MODELS)}")
    seeded = bundle.model == "seeded"
    if seeded != (bundle.model_config is not None) or seeded != (bundle.model_seed is not None):
        refuse(
            "model_config",
            f"model {bundle.model!r}: model_config and model_seed go with model 'seeded' and only with it",
        )
    if bundle.model_seed is not None and (
        not isinstance(bundle.model_seed, int) or not 0 <= bundle.model_seed < 1 << 63
    ):
        refuse("model_seed", f"got {bundle.model_seed!r}; expected an integer in 0..2^63-1")
    for name, mapping in (("provenance", bundle.provenance), ("model_config", bundle.model_config)):
        try:
            size = len(to_json(mapping))
        except (TypeError, ValueError) as error:
            refuse(name, f"cannot be stored as JSON ({error}); keep to strings, finite numbers, lists and objects")
        if size > MAX_JSON_BYTES:
            refuse(name, f"takes {size} bytes as JSON; expected at most {MAX_JSON_BYTES}")


def _check_requests(bundle: Bundle) -> dict[str, int]:
    """Sizes of the axes that the request group fixes."""
    request = bundle.request
    batch = np.size(request.prefix_len)
    if batch < 1:
        refuse("request/prefix_len", "it is empty; expected at least one request")
    sizes = {
        "requests": batch,
        "requests+1": batch + 1,
        "heads": bundle.num_heads,
        "width": bundle.width,
        "d_latent": bundle.d_latent,
    }
    for name in ("prefix_len", "num_nodes", "qo_indptr", "kv_indptr"):
        _check_array(f"request/{name}", getattr(request, name), spec_of(Request, name), sizes)
    prefix_len, num_nodes = request.prefix_len.astype(np.int64), request.num_nodes.astype(np.int64)
    for b in range(batch):
        if prefix_len[b] < 0:
            refuse("request/prefix_len", f"request {b} has {prefix_len[b]}; expected 0 or more")
        if not 1 <= num_nodes[b] <= MAX_NODES:
            refuse("request/num_nodes", f"request {b} has {num_nodes[b]}; expected 1..{MAX_NODES}, the root counted")
        if prefix_len[b] + num_nodes[b] > MAX_KEYS:
            refuse(
                "request/prefix_len",
                f"request {b} has {prefix_len[b] + num_nodes[b]} keys; expected at most {MAX_KEYS}",
            )
    counts = {"qo_indptr": num_nodes, "kv_indptr": prefix_len + num_nodes}
    for name, count in counts.items():
        expected = np.concatenate([[0], np.cumsum(count)])
        if not np.array_equal(getattr(request, name), expected):
            refuse(
                f"request/{name}",
                f"got {_short(getattr(request, name))}; expected {_short(expected)} from prefix_len and num_nodes",
            )
    return sizes | {
        "nodes": int(num_nodes.sum()),
        "keys": int((prefix_len + num_nodes).sum()),
        "prefix": int(prefix_len.sum()),
        "pairs": int((num_nodes**2).sum()),
    }


def _check_arrays(bundle: Bundle, sizes: dict[str, int]) -> None:
    if bundle.expected is not None:
        name = "expected/accepted_len"
        _check_array(name, bundle.expected.accepted_len, spec_of(Expected, "accepted_len"), sizes)
        lengths = bundle.expected.accepted_len
        for b in range(bundle.batch):
            if not 1 <= lengths[b] <= bundle.request.num_nodes[b]:
                refuse(name, f"request {b} has {lengths[b]}; expected 1..{bundle.request.num_nodes[b]}")
        sizes = sizes | {"accepted": int(lengths.sum())}
    if not bundle.layers:
        refuse("layers", "there is none; expected layers 0, 1, ...")
    for index, layer in enumerate(bundle.layers):
        if (layer.out is None) != (layer.lse is None) or (layer.out is None) == bundle.complete:
            refuse(f"layers/{index}/out", "out, lse and expected go together; expected all of them or none")
    if bundle.witness is not None and len(bundle.witness.attn) not in (0, bundle.num_layers):
        refuse("witness/attn", f"it has {len(bundle.witness.attn)} layers; expected {bundle.num_layers} or none")
    for name, array, spec in datasets(bundle):
        _check_array(name, array, spec, sizes)
    if bundle.witness is not None and bundle.witness.attn and sizes["values"] % bundle.num_heads:
        refuse("witness/attn/0", f"rows of {sizes['values']}; expected a multiple of num_heads = {bundle.num_heads}")


def _check_array(name: str, array: Any, spec: Spec, sizes: dict[str, int]) -> None:
    """Shape and dtype of one dataset; an axis met for the first time fixes its size in `sizes`."""
    expected = f"{spec.dtype} [{', '.join(spec.names)}]"
    if not isinstance(array, np.ndarray):
        refuse(name, f"got {type(array).__name__}; expected an array of {expected}")
    if array.dtype != spec.dtype:
        refuse(name, f"dtype is {array.dtype}; expected {expected}")
    if array.ndim != len(spec.names):
        refuse(name, f"shape is {list(array.shape)}; expected {expected}")
    wanted = [sizes.setdefault(axis, size) for axis, size in zip(spec.names, array.shape, strict=True)]
    if list(array.shape) != wanted:
        refuse(name, f"shape is {list(array.shape)}; expected {wanted} = [{', '.join(spec.names)}]")


def _check_tree(bundle: Bundle, request: int) -> None:
    rows = bundle.nodes(request)
    tokens, parents, depths = (getattr(bundle.tree, name)[rows].tolist() for name in ("tokens", "parents", "depths"))
    n = len(parents)
    if parents[0] != -1 or depths[0] != 0:
        refuse(
            "tree/parents",
            f"request {request}: node 0 has parent {parents[0]}, depth {depths[0]}; the root has parent -1, depth 0",
        )
    for i in range(1, n):
        if not 0 <= parents[i] < n:
            refuse("tree/parents", f"request {request}: node {i} has parent {parents[i]}; expected 0..{i - 1}")
        if parents[i] >= i:
            kind = "which is in a cycle" if _in_cycle(parents, i) else "which comes after it"
            refuse("tree/parents", f"request {request}: node {i} has parent {parents[i]}, {kind}; expected 0..{i - 1}")
        if depths[i] != depths[parents[i]] + 1:
            refuse(
                "tree/depths", f"request {request}: node {i} has depth {depths[i]}; expected {depths[parents[i]] + 1}"
            )
    children = set()
    for i in range(1, n):
        if (parents[i], tokens[i]) in children:
            refuse(
                "tree/tokens",
                f"request {request}: node {i} repeats token {tokens[i]} of a sibling; siblings must differ",
            )
        children.add((parents[i], tokens[i]))
    visible = np.eye(n, dtype=np.uint8)
    for i in range(1, n):
        visible[i] |= visible[parents[i]]
    wrong = np.argwhere(bundle.visibility(request) != visible)
    if wrong.size:
        i, j = wrong[0].tolist()
        refuse(
            "tree/visibility",
            f"request {request}: node {i} sees node {j}: {bundle.visibility(request)[i, j]}; "
            f"expected {visible[i, j]}, since it sees its ancestors and itself",
        )


def _in_cycle(parents: list[int], node: int) -> bool:
    seen = set()
    while 0 <= node < len(parents) and node not in seen:
        seen.add(node)
        node = parents[node]
    return node in seen


def _check_slots(bundle: Bundle) -> None:
    slots = bundle.request.kv_indices
    outside = np.flatnonzero((slots < 0) | (slots >= bundle.num_slots))
    if outside.size:
        refuse(
            "request/kv_indices", f"key {outside[0]} has slot {slots[outside[0]]}; expected 0..{bundle.num_slots - 1}"
        )
    order = np.argsort(slots, kind="stable")
    repeated = np.flatnonzero(np.diff(slots[order]) == 0)
    if repeated.size:
        first, second = order[repeated[0]], order[repeated[0] + 1]
        refuse(
            "request/kv_indices", f"keys {first} and {second} share slot {slots[first]}; expected a slot for each key"
        )


def _check_values(bundle: Bundle) -> None:
    for name, array, spec in datasets(bundle):
        logical = spec.logical_dtype
        if logical == "bfloat16":
            finite = (array & np.uint16(0x7F80)) != 0x7F80
        elif logical == "float32":
            finite = np.isfinite(array)
        else:
            continue
        if name == "drafter/log_probs":
            finite |= np.isneginf(array)
        if not finite.all():
            where = np.argwhere(~finite)[0].tolist()
            refuse(name, f"the value at {where} is not finite; expected finite numbers")
    for name in ("context/tokens", "tree/tokens", "drafter/token_ids", "drafter/budget"):
        group, attribute = name.split("/")
        owner = getattr(bundle, group)
        if owner is not None and (getattr(owner, attribute) < 0).any():
            where = np.argwhere(getattr(owner, attribute) < 0)[0].tolist()
            refuse(name, f"the value at {where} is negative; expected 0 or more")
    if bundle.drafter is not None:
        rising = np.argwhere(bundle.drafter.log_probs[..., 1:] > bundle.drafter.log_probs[..., :-1])
        if rising.size:
            refuse("drafter/log_probs", f"it rises after {rising[0].tolist()}; expected descending values along rank")


def _check_expected(bundle: Bundle, expected: Expected) -> None:
    vocab = expected.logits.shape[1]
    if vocab < 2:
        refuse("expected/logits", f"the vocabulary has {vocab} tokens; expected 2 or more")
    for name, tokens in (("argmax", expected.argmax), ("second", expected.second), ("bonus", expected.bonus)):
        if (tokens < 0).any() or (tokens >= vocab).any():
            refuse(f"expected/{name}", f"got {_short(tokens)}; expected 0..{vocab - 1}")
    if (expected.margin < 0).any():
        refuse("expected/margin", "a margin is negative; expected the gap between the best and the second logit")
    for name in ("logit_budget", "logit_budget_bfloat16"):
        value = getattr(expected, name)
        if not isinstance(value, float) or not 0 < value < math.inf:
            refuse(f"expected/{name}", f"got {value!r}; expected a positive finite number")
    for b in range(bundle.batch):
        path = expected.accepted_path[bundle.accepted(b)].tolist()
        n = int(bundle.request.num_nodes[b])
        parents = bundle.tree.parents[bundle.nodes(b)].tolist()
        if (
            path[0] != 0
            or any(not 0 < i < n for i in path[1:])
            or any(parents[i] != p for p, i in itertools.pairwise(path))
        ):
            refuse(
                "expected/accepted_path",
                f"request {b} has {path}; expected a path of the tree that starts at the root, 0",
            )
        slots, committed = bundle.node_slots(b)[: len(path)], expected.committed_slots[bundle.accepted(b)]
        if not np.array_equal(committed, slots):
            refuse(
                "expected/committed_slots",
                f"request {b} has {_short(committed)}; expected its first node slots {_short(slots)}",
            )


def _short(values: Array) -> str:
    text = ", ".join(str(value) for value in np.ravel(values)[:8].tolist())
    return f"[{text}{', ...' if np.size(values) > 8 else ''}]"
