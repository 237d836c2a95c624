"""The comparator and the tolerances, tested with wrong answers: each mutant must be rejected on some bundle."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine import bundle as bundles
from kdtree_engine.compare import compare
from kdtree_engine.ops.verify_attn import LSE_ABS, OUT_ROW_REL_L2
from oracle.mutants import MUTANTS, PAGED_MUTANTS
from oracle.verify_attn import verify_attn
from oracle.verify_attn_paged import verify_attn_paged
from phases import exactness, paged, synthetic
from phases.paged import Case

if TYPE_CHECKING:
    from kdtree_engine.bundle import Bundle


@functools.cache
def all_bundles() -> tuple[Bundle, ...]:
    """Small synthetic ones that are always there, and the committed ones."""
    small = (
        synthetic.synthetic(1, shape="chain", num_layers=1),
        synthetic.synthetic(2, num_nodes=(9,), num_layers=1),
        synthetic.synthetic(3, prefix_len=(0, 1, 40), num_nodes=(1, 5, 12), page_size=16, num_layers=1),
    )
    committed = (bundles.read(path) for path in bundles.find(exactness.FIXTURES / "bundles"))
    return small + tuple(committed)


@functools.cache
def inputs_and_answer(index: int) -> tuple[dict[str, Any], tuple[np.ndarray, np.ndarray]]:
    bundle = all_bundles()[index]
    inputs: dict[str, Any] = bundle.dense(0) | {"sm_scale": bundle.sm_scale, "d_latent": bundle.d_latent}
    return inputs, verify_attn(**inputs)


def accepted(index: int, out: np.ndarray, lse: np.ndarray) -> bool:
    _, (right_out, right_lse) = inputs_and_answer(index)
    return compare(out, right_out, name="out").within(row_rel_l2=OUT_ROW_REL_L2) and compare(
        lse, right_lse, name="lse"
    ).within(max_abs=LSE_ABS)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name: str) -> None:
    rejected = []
    for index, bundle in enumerate(all_bundles()):
        inputs, _ = inputs_and_answer(index)
        if not accepted(index, *MUTANTS[name](**inputs, prefix_len=bundle.request.prefix_len)):
            rejected.append(bundle.name)
    assert rejected, f"{name} passes on every bundle"


def test_right_answers_are_accepted() -> None:
    for index in range(len(all_bundles())):
        _, (out, lse) = inputs_and_answer(index)
        assert accepted(index, out.astype(np.float32), lse.astype(np.float32))


def test_mutants_leave_their_inputs_alone() -> None:
    bundle = all_bundles()[2]
    inputs, _ = inputs_and_answer(2)
    for name, mutant in MUTANTS.items():
        copies: dict[str, Any] = {
            key: value.copy() if isinstance(value, np.ndarray) else value for key, value in inputs.items()
        }
        mutant(**copies, prefix_len=bundle.request.prefix_len)
        for key, value in inputs.items():
            np.testing.assert_array_equal(copies[key], value, err_msg=f"{name} writes to {key}")


# Together they use every layout and option of the paged op.
PAGED_CASES = [
    Case((9, 3), (70, 33), 5, strided=True),
    Case((2, 0, 66), (3, 5, 40), 2, tree="any", form="mask_bits", pool_drafts=True),
    Case((5, 9), (20, 40), 4, form="parents", page_size=16, int64=("page_table",)),
    Case((7, 4), (33, 0), 3, form="full_mask", page_size=32, pool_drafts=True),
    Case((4,), (0,), 4, tree="any", form="full_mask", strided=True),
    Case((3, 2), (18, 40), 4, tree="chain", form="causal", int64=("kv_indices",), logit_cap=3.0),
    Case((6, 2), (30, 8), 4, form="full_mask", skip="prefix"),
    Case((6, 2), (30, 8), 4, skip="draft"),
    Case((2,), (300,), 4),
]


def slots_outside() -> dict[str, Any]:
    """A batch of which one prefix slot and one draft slot lie outside the pool."""
    inputs = Case((4,), (20,), pool_drafts=True).inputs()
    inputs["kv_indices"][3] = inputs["draft_slots"][1] = -1
    return inputs


@functools.cache
def paged_questions() -> tuple[tuple[dict[str, Any], slice, tuple[np.ndarray, np.ndarray]], ...]:
    """Arguments, rows that count, and the right answer for them."""
    questions = [(case.inputs(), case.live) for case in PAGED_CASES] + [(slots_outside(), slice(0, 4))]
    answers = [verify_attn_paged(**inputs) for inputs, _ in questions]
    return tuple((*question, (out, lse)) for question, (out, lse) in zip(questions, answers, strict=True))


def paged_problems(mutant: Any) -> list[list[str]]:
    """What the gate finds wrong with each answer of a mutant, stored as a kernel would store it."""
    found = []
    for inputs, live, (right_out, right_lse) in paged_questions():
        out, lse = mutant(**inputs)
        stored = bundles.to_bfloat16(out[live].astype(np.float32)), lse[live].astype(np.float32)
        found.append(paged.problems(stored, (right_out[live], right_lse[live]))[0])
    return found


@pytest.mark.parametrize("name", PAGED_MUTANTS)
def test_paged_mutant_is_rejected(name: str) -> None:
    assert any(paged_problems(PAGED_MUTANTS[name])), f"{name} passes on every case"


def test_right_paged_answers_are_accepted() -> None:
    assert not any(paged_problems(verify_attn_paged))


def test_paged_mutants_leave_their_inputs_alone() -> None:
    for inputs, _, _ in paged_questions():
        copies = {name: value.copy() for name, value in inputs.items() if isinstance(value, np.ndarray)}
        for name, mutant in PAGED_MUTANTS.items():
            mutant(**inputs)
            for key, value in copies.items():
                np.testing.assert_array_equal(inputs[key], value, err_msg=f"{name} writes to {key}")


@pytest.mark.parametrize("mutants", [MUTANTS, PAGED_MUTANTS], ids=["dense", "paged"])
def test_mutants_say_what_they_stand_for(mutants: dict[str, Any]) -> None:
    for name, mutant in mutants.items():
        assert "(" in (inspect.getdoc(mutant) or ""), name
