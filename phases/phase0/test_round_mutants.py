"""The cases of a round's ops, tested with wrong answers: each mutant must differ on some case."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kdtree_engine.bundle import from_bfloat16
from oracle.round_mutants import ACCEPT_MUTANTS, BUILD_MUTANTS, COMPACT_MUTANTS, grow
from oracle.tree_build import tree_build_batch
from phases.rounds import ACCEPT_CASES, BUILD_CASES, COMPACT_CASES, AcceptCase, BuildCase, differences


@pytest.mark.parametrize("name", BUILD_MUTANTS)
def test_build_mutant_is_rejected(name: str) -> None:
    for case in BUILD_CASES:
        inputs = case.inputs()
        marginals = [inputs.pop(argument) for argument in ("log_probs", "token_ids", "root_tokens")]
        if differences(BUILD_MUTANTS[name](*marginals, **inputs), case.answer()):
            return
    pytest.fail(f"{name} passes on every case")


@pytest.mark.parametrize("case", BUILD_CASES, ids=str)
def test_the_mutants_own_construction_is_right(case: BuildCase) -> None:
    """Without a fault it gives the oracle's trees, so that what a mutant gets wrong is its fault alone."""
    inputs = case.inputs()
    marginals = [inputs.pop(argument) for argument in ("log_probs", "token_ids", "root_tokens")]
    assert not differences(tree_build_batch(*marginals, **inputs, build=grow), case.answer())


def _inputs(case: AcceptCase) -> dict[str, Any]:
    inputs = case.inputs()
    if "logits" in inputs and inputs["logits"].dtype == np.uint16:
        inputs["logits"] = from_bfloat16(inputs["logits"])
    return inputs


@pytest.mark.parametrize("name", ACCEPT_MUTANTS)
def test_accept_mutant_is_rejected(name: str) -> None:
    for case in ACCEPT_CASES:
        inputs = _inputs(case)
        if differences(ACCEPT_MUTANTS[name](inputs.pop("tokens"), **inputs), case.answer()):
            return
    pytest.fail(f"{name} passes on every case")


@pytest.mark.parametrize("name", COMPACT_MUTANTS)
def test_compact_mutant_is_rejected(name: str) -> None:
    for case in COMPACT_CASES:
        inputs = case.inputs()
        given = [inputs.pop(argument) for argument in ("pools", "path", "path_len")]
        if differences(COMPACT_MUTANTS[name](*given, **inputs), case.answer()):
            return
    pytest.fail(f"{name} passes on every case")
