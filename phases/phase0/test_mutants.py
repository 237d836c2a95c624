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
from oracle.mutants import MUTANTS
from oracle.verify_attn import verify_attn
from phases import exactness, synthetic

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


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_says_what_it_stands_for(name: str) -> None:
    assert "(" in (inspect.getdoc(MUTANTS[name]) or "")
