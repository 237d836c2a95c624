"""Phase 2: kv_compact against its oracle, every byte of the pool, and the commit of every bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine import Compaction, kv_compact, pool_addresses
from phases.rounds import COMPACT_CASES, CompactCase, Padded, arrays, differences

if TYPE_CHECKING:
    from collections.abc import Callable

    from kdtree_engine.bundle import Bundle
    from phases.places import Place

    Evidence = Callable[..., None]

OPS = ("kv_compact",)


@pytest.mark.parametrize("case", COMPACT_CASES, ids=str)
def test_equals_oracle(place: Place, kernel_name: str, case: CompactCase, evidence: Evidence) -> None:
    assert not differences(case.run(place), case.answer())
    evidence(kernel=kernel_name)


def test_commit_of_a_bundle(place: Place, kernel_name: str, bundle: Bundle, evidence: Evidence) -> None:
    """The accepted nodes' rows of all layers lie in the committed slots, and no other row has changed."""
    expected = bundle.expected
    assert expected is not None
    width = int(expected.accepted_len.max())
    path = np.full((bundle.batch, width), -1, np.int32)
    for b, length in enumerate(expected.accepted_len):
        path[b, :length] = expected.accepted_path[bundle.accepted(b)]
    before = np.stack([bundle.pool(layer, poison=7.0) for layer in range(bundle.num_layers)])
    pools = place.strided(before.copy())
    found = arrays(
        place,
        kv_compact(
            pools,
            place.strided(path),
            place.strided(expected.accepted_len),
            node_slots=place.strided(np.concatenate([bundle.node_slots(b) for b in range(bundle.batch)])),
            qo_indptr=place.strided(bundle.request.qo_indptr),
            max_q_len=int(bundle.request.num_nodes.max()),
            library=place.library,
        ),
    )
    after = place.array(pools)
    np.testing.assert_array_equal(found["status"], 0)
    right = before.copy()
    for b, length in enumerate(expected.accepted_len):
        committed = expected.committed_slots[bundle.accepted(b)]
        np.testing.assert_array_equal(found["committed_slots"][b, :length], committed)
        slots = bundle.node_slots(b)
        np.testing.assert_array_equal(found["free_slots"][b, : len(slots) - length], slots[length:])
        assert found["num_free"][b] == len(slots) - length
        right[:, committed] = before[:, slots[expected.accepted_path[bundle.accepted(b)]]]
    np.testing.assert_array_equal(after, right)
    evidence(kernel=kernel_name, bundle=bundle.name, equal=True)


def test_a_request_alone_or_in_company(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """Bad neighbours included: the whole batch moves what the requests move one after the other."""
    case = CompactCase((11,) * 48, "bad")
    whole, inputs = case.run(place), case.inputs()
    pools = place.strided(inputs.pop("pools").copy())
    for b in range(48):
        alone = {name: place.strided(value[b : b + 1]) for name, value in inputs.items()}
        steps = [alone.pop(name) for name in ("path", "path_len")]
        one = arrays(place, kv_compact(pools, *steps, **alone, library=place.library))
        for name, array in one.items():
            np.testing.assert_array_equal(array[0], whole[name][b], err_msg=name)
    np.testing.assert_array_equal(place.array(pools), whole["pools"])
    evidence(kernel=kernel_name)


def test_only_the_outputs_are_written(place: Place, kernel_name: str, evidence: Evidence) -> None:
    case = CompactCase((9, 5, 20), slots_dtype="int64")
    inputs = {name: place.given(value) for name, value in case.inputs().items()}
    given = [inputs.pop(name) for name in ("pools", "path", "path_len")]
    reference = case.run(place)
    bands = {name: Padded(place, reference[name]) for name in Compaction._fields}
    out = Compaction(**{name: band.tensor for name, band in bands.items()})
    kv_compact(*given, **inputs, out=out, library=place.library)
    for name, band in bands.items():
        band.check()
        np.testing.assert_array_equal(place.array(band.tensor), reference[name])
    for name, value in case.inputs().items():
        if name in inputs and isinstance(value, np.ndarray):
            np.testing.assert_array_equal(place.array(inputs[name]), value)
    evidence(kernel=kernel_name)


def test_outputs_may_be_left_out(place: Place, kernel_name: str, evidence: Evidence) -> None:
    case = CompactCase((9, 5, 20))
    whole = case.run(place)
    for extra in (None, "committed_slots", "free_slots", "num_free"):
        inputs = {name: place.given(value) for name, value in case.inputs().items()}
        given = [inputs.pop(name) for name in ("pools", "path", "path_len")]
        tensors: dict[str, Any] = dict.fromkeys(Compaction._fields)
        for name in ("status", *([extra] if extra else [])):
            tensors[name] = place.given(np.zeros_like(whole[name]))
        kv_compact(*given, **inputs, out=Compaction(**tensors), library=place.library)
        for name, tensor in tensors.items():
            if tensor is not None:
                np.testing.assert_array_equal(place.array(tensor), whole[name], err_msg=name)
        np.testing.assert_array_equal(place.array(given[0]), whole["pools"])
    evidence(kernel=kernel_name)


def test_addresses_made_once(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """Separate layers by addresses that the caller keeps."""
    case = CompactCase((9, 5, 20), layers=4, separate=True)
    inputs = {name: place.given(value) for name, value in case.inputs().items()}
    given = [inputs.pop(name) for name in ("pools", "path", "path_len")]
    layers = [given[0][layer] for layer in range(4)]
    kv_compact(layers, *given[1:], **inputs, addresses=pool_addresses(layers), library=place.library)
    np.testing.assert_array_equal(place.array(given[0]), case.run(place)["pools"])
    evidence(kernel=kernel_name)


def test_addresses_beyond_32_bits(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """A pool of more than 2^32 bytes, of which a few rows are in use; on the host the rest takes no memory."""
    slots, row = 3_800_000, 576
    assert slots * row * 2 > 2**32
    if place.kind == "host":
        pools: Any = np.zeros((1, slots, row), np.uint16)
    else:
        import torch

        pools = torch.zeros((1, slots, row), dtype=torch.int16, device="cuda")
    node_slots = np.array([[slots - 1, 3_728_271, 5]], np.int32)
    for value, slot in enumerate(node_slots[0], start=1):
        pools[0, int(slot)] = value
    steps = np.array([[0, 2]], np.int32), np.array([2], np.int32)
    kv_compact(pools, *map(place.strided, steps), node_slots=place.strided(node_slots), library=place.library)
    assert [int(pools[0, int(slot), -1]) for slot in node_slots[0]] == [1, 3, 3]
    evidence(kernel=kernel_name)
