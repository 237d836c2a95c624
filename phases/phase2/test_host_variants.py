"""Phase 2's attention on the host: the same bits in any thread order, with early or late copies, and no race."""

from __future__ import annotations

import hashlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine import bundle as bundles
from phases import host_build
from phases.conftest import BUNDLES
from phases.paged import Case, behind_the_dense_interface
from phases.places import Place

if TYPE_CHECKING:
    from collections.abc import Callable

    Evidence = Callable[..., None]

OPS = ("verify_attn_paged", "merge_partials")

# (order, copies): with the default, forward and lazy, every order and both times of landing.
SCHEDULES = [("forward", "eager"), ("reverse", "lazy"), ("random:1", "eager"), ("random:20260601", "lazy")]

# Each row tile, with and without a split; every geometry, form, index width and layout once.
CASES = [
    Case((2, 0, 3), (40, 7, 0), 2, form="mask_bits", pool_drafts=True, split_tokens=16),
    Case((9, 1), (70, 33), 2, 256, 32, form="full_mask", strided=True, int64=("kv_indices", "qo_indptr")),
    Case((17, 3), (130, 5), 5, tree="any", page_size=16, pool_drafts=True, strided=True, logit_cap=3.0),
    Case((65,), (50,), 2, 512, 0, form="parents", page_size=64, split_tokens=32),
    Case((33, 2), (100, 3), 3, 256, 64, tree="chain", form="causal", out_dtype="float32", int64=("kv_indptr",)),
    Case((2, 1), (2200, 20), 8, split_tokens=16, form="mask", spread=12.0),
]
SUBJECTS: list[Case | Path] = [*CASES, *bundles.find(BUNDLES)]


def name(subject: Case | Path) -> str:
    return subject.stem if isinstance(subject, Path) else str(subject)


def digest(subject: Case | Path, kernel_name: str, path: Path) -> str:
    """What a library's kernel makes of a case or of a bundle, as a hash of its bits; a merge, of three parts."""
    place = Place("host", path)
    merges = kernel_name == "merge_partials"
    call = partial(place.in_parts, 3) if merges else partial(place.verify_attn_paged, kernel_name)
    if isinstance(subject, Path):
        bundle = bundles.read(subject)
        result = behind_the_dense_interface(bundle, call)(**bundle.dense(0), sm_scale=bundle.sm_scale)
    else:
        options: dict[str, Any] = {} if merges else subject.options()
        out, lse = call(**subject.inputs(), **options)
        result = out[subject.live], lse[subject.live]
    return hashlib.sha256(b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in result)).hexdigest()


@pytest.mark.parametrize(("order", "asynchrony"), SCHEDULES, ids=map("-".join, SCHEDULES))
@pytest.mark.parametrize("subject", SUBJECTS, ids=name)
def test_order_and_copies(
    place: Place,
    kernel_name: str,
    subject: Case | Path,
    order: str,
    asynchrony: str,
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = digest(subject, kernel_name, place.library.path)
    monkeypatch.setenv("KDTREE_SIMT_ORDER", order)
    monkeypatch.setenv("KDTREE_SIMT_ASYNC", asynchrony)
    assert digest(subject, kernel_name, place.library.path) == plain
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("asynchrony", ["lazy", "eager"])
@pytest.mark.parametrize("subject", SUBJECTS, ids=name)
def test_race_checker_is_silent(
    place: Place,
    kernel_name: str,
    subject: Case | Path,
    asynchrony: str,
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A race would fail the launch with the two source lines."""
    monkeypatch.setenv("KDTREE_SIMT_ASYNC", asynchrony)
    plain = digest(subject, kernel_name, place.library.path)
    assert digest(subject, kernel_name, host_build.product("race")) == plain
    evidence(kernel=kernel_name)


def test_sanitizers_are_silent(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer in a process of their own; either ends it with a report."""
    found = host_build.under_asan("phases.phase2.test_host_variants", kernel_name)
    assert found == [digest(subject, kernel_name, place.library.path) for subject in SUBJECTS]
    evidence(kernel=kernel_name)


if __name__ == "__main__":
    json.dump([digest(subject, sys.argv[2], Path(sys.argv[1])) for subject in SUBJECTS], sys.stdout)
