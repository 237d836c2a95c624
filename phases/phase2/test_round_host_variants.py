"""The ops of a round on the host: the same bits in any thread order, with early or late copies, and no race."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from phases import host_build
from phases.phase2.test_host_variants import SCHEDULES
from phases.places import Place
from phases.rounds import CASES

if TYPE_CHECKING:
    from collections.abc import Callable

    Evidence = Callable[..., None]

OPS = tuple(CASES)


def digests(op: str, path: Path) -> list[str]:
    """What a library's kernel makes of each case, as a hash of its bits."""
    place = Place("host", path)
    found = []
    for case in CASES[op]:
        outputs = case.run(place).values()
        parts = (np.ascontiguousarray(tensor).tobytes() for tensor in outputs)
        found.append(hashlib.sha256(b"".join(parts)).hexdigest())
    return found


@pytest.mark.parametrize(("order", "asynchrony"), SCHEDULES, ids=map("-".join, SCHEDULES))
def test_order_and_copies(
    place: Place,
    kernel_name: str,
    order: str,
    asynchrony: str,
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = digests(kernel_name, place.library.path)
    monkeypatch.setenv("KDTREE_SIMT_ORDER", order)
    monkeypatch.setenv("KDTREE_SIMT_ASYNC", asynchrony)
    assert digests(kernel_name, place.library.path) == plain
    evidence(kernel=kernel_name, cases=len(plain))


def test_race_checker_is_silent(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """A race would fail the launch with the two source lines."""
    found = digests(kernel_name, host_build.product("race"))
    assert found == digests(kernel_name, place.library.path)
    evidence(kernel=kernel_name, cases=len(found))


def test_sanitizers_are_silent(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer in a process of their own; either ends it with a report."""
    found = host_build.under_asan(__name__, kernel_name)
    assert found == digests(kernel_name, place.library.path)
    evidence(kernel=kernel_name)


if __name__ == "__main__":
    json.dump(digests(sys.argv[2], Path(sys.argv[1])), sys.stdout)
