"""Phase 2: tree_build against its oracle, to the last bit, and the trees of every bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine import DraftTree, tree_build, verify_attn_paged
from phases.discipline import assert_same_bits
from phases.rounds import BUILD_CASES, BuildCase, Padded, arrays, differences

if TYPE_CHECKING:
    from collections.abc import Callable

    from kdtree_engine.bundle import Bundle
    from phases.places import Place

    Evidence = Callable[..., None]

OPS = ("tree_build",)


@pytest.mark.parametrize("case", BUILD_CASES, ids=str)
def test_equals_oracle(place: Place, kernel_name: str, case: BuildCase, evidence: Evidence) -> None:
    assert not differences(case.run(place), case.answer())
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("seed", range(40))
def test_permutation_ties(place: Place, kernel_name: str, seed: int, evidence: Evidence) -> None:
    """The inputs that a builder with float32 scores gets wrong."""
    case = BuildCase(5, 15, 8, 257, "permutations", seed=seed)
    assert not differences(case.run(place), case.answer())
    evidence(kernel=kernel_name)


def test_trees_of_a_bundle(place: Place, kernel_name: str, bundle: Bundle, evidence: Evidence) -> None:
    assert bundle.drafter is not None
    first = bundle.request.qo_indptr[:-1]
    sizes = bundle.request.num_nodes
    built = arrays(
        place,
        tree_build(
            place.strided(bundle.drafter.log_probs),
            place.strided(bundle.drafter.token_ids),
            place.strided(bundle.tree.tokens[first]),
            max_nodes=int(sizes.max()),
            budgets=place.strided(bundle.drafter.budget),
            seq_lens=place.strided(bundle.request.prefix_len),
            library=place.library,
        ),
    )
    np.testing.assert_array_equal(built["num_nodes"], sizes)
    np.testing.assert_array_equal(built["status"], 0)
    for b, n in enumerate(sizes):
        rows = bundle.nodes(b)
        for name in ("tokens", "parents", "depths"):
            np.testing.assert_array_equal(built[name][b, :n], getattr(bundle.tree, name)[rows])
        np.testing.assert_array_equal(built["visibility"][b, :n, :n], bundle.visibility(b))
        np.testing.assert_array_equal(
            built["positions"][b, :n], bundle.request.prefix_len[b] + bundle.tree.depths[rows]
        )
    evidence(kernel=kernel_name, bundle=bundle.name, equal=True)


def test_a_request_alone_or_in_company(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """Bad neighbours included."""
    case = BuildCase(48, 5, 6, 21, "bad")
    whole = case.run(place)
    for b in (0, 7, 29, 47):
        alone = {
            name: place.given(value[b : b + 1]) if isinstance(value, np.ndarray) else value
            for name, value in case.inputs().items()
        }
        one = arrays(place, tree_build(**alone, library=place.library))
        one["retrive_index"] = one["retrive_index"] + b * case.max_nodes
        for name, array in one.items():
            np.testing.assert_array_equal(array[0], whole[name][b], err_msg=name)
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("case", [BuildCase(3, 5, 4, 13), BuildCase(2, 8, 9, 65, index_dtype="int64")], ids=str)
def test_only_the_outputs_are_written(place: Place, kernel_name: str, case: BuildCase, evidence: Evidence) -> None:
    """Each lies between bands of garbage and is written wholly, whatever its alignment; inputs are left alone."""
    answer = case.answer()
    inputs = {name: place.given(value) for name, value in case.inputs().items()}
    reference = case.run(place)
    bands = {name: Padded(place, array) for name, array in reference.items()}
    out = DraftTree(**{name: band.tensor for name, band in bands.items()})
    tree_build(**inputs, index_dtype=case.index_dtype, out=out, library=place.library)
    for band in bands.values():
        band.check()
    assert not differences(arrays(place, out), answer)
    for name, value in case.inputs().items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(place.array(inputs[name]), value)
    evidence(kernel=kernel_name)


def test_outputs_may_be_left_out(place: Place, kernel_name: str, evidence: Evidence) -> None:
    case = BuildCase(3, 5, 4, 13)
    whole = case.run(place)
    needed = ("tokens", "parents", "num_nodes", "status")
    inputs = {name: place.given(value) for name, value in case.inputs().items()}
    for extra in (None, *(set(whole) - set(needed))):
        tensors: dict[str, Any] = dict.fromkeys(DraftTree._fields)
        for name in (*needed, *([extra] if extra else [])):
            tensors[name] = place.given(np.zeros_like(whole[name]))
        tree_build(**inputs, out=DraftTree(**tensors), library=place.library)
        for name, tensor in tensors.items():
            if tensor is not None:
                np.testing.assert_array_equal(place.array(tensor), whole[name], err_msg=name)
    evidence(kernel=kernel_name)


def test_verify_attention_takes_the_tree_as_it_is(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """Bytes, bits and parents of a batch with unfinished trees give one result; padding sees itself alone."""
    case = BuildCase(3, 2, 3, 20)  # 13 nodes each
    tree = tree_build(**{name: place.given(value) for name, value in case.inputs().items()}, library=place.library)
    assert place.array(tree.num_nodes).tolist() == [13] * 3
    rng = np.random.default_rng(20261201)
    rows = 3 * 20
    bits = (rng.standard_normal((rows, 3, 576)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    keys = (rng.standard_normal((rows + 50, 576)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    order = rng.permutation(50).astype(np.int32)
    results = []
    for form in (
        {"mask": tree.visibility.reshape(-1)},
        {"mask_bits": tree.visibility_bits.reshape(rows, -1)},
        {"parents": tree.parents.reshape(-1)},
    ):
        out, lse = verify_attn_paged(
            place.strided(bits),
            place.strided(keys[rows:]),
            qo_indptr=place.strided(np.arange(4, dtype=np.int32) * 20),
            kv_indptr=place.strided(np.array([0, 10, 10, 50], np.int32)),
            kv_indices=place.strided(order),
            draft_kv=place.strided(keys[:rows]),
            sm_scale=0.04,
            library=place.library,
            **form,
        )
        results.append((place.array(out), place.array(lse)))
    for other in results[1:]:
        assert_same_bits(other, results[0])
    evidence(kernel=kernel_name)
