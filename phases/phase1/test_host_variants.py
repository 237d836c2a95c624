"""Phase 1 on the host: the same bits in any thread order, with early or late copies, sanitised and race-checked."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine import bundle as bundles
from kdtree_engine import library, verify_attn
from phases import host_build

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kdtree_engine.bundle import Bundle
    from phases.places import Place

    Evidence = Callable[..., None]

# (order, copies): with the default, forward and lazy, every order and both times of landing.
SCHEDULES = [("forward", "eager"), ("reverse", "lazy"), ("random:1", "eager"), ("random:20260601", "lazy")]


def inputs(bundle: Bundle) -> dict[str, Any]:
    return {**bundle.dense(0, math.nan), "sm_scale": bundle.sm_scale, "d_latent": bundle.d_latent}


def digest(kernel: str, path: Path, given: dict[str, Any]) -> str:
    """What a library's kernel makes of the inputs, as a hash of its bits."""
    out, lse = verify_attn(**given, kernel=kernel, split_tokens=128, library=library(path))
    return hashlib.sha256(np.ascontiguousarray(out).tobytes() + np.ascontiguousarray(lse).tobytes()).hexdigest()


@pytest.mark.parametrize(("order", "asynchrony"), SCHEDULES, ids=map("-".join, SCHEDULES))
def test_order_and_copies(
    place: Place,
    kernel_name: str,
    bundle: Bundle,
    order: str,
    asynchrony: str,
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = digest(kernel_name, place.library.path, inputs(bundle))
    monkeypatch.setenv("KDTREE_SIMT_ORDER", order)
    monkeypatch.setenv("KDTREE_SIMT_ASYNC", asynchrony)
    assert digest(kernel_name, place.library.path, inputs(bundle)) == plain
    evidence(kernel=kernel_name, bundle=bundle.name)


@pytest.mark.parametrize("asynchrony", ["lazy", "eager"])
def test_race_checker_is_silent(
    place: Place,
    kernel_name: str,
    bundle: Bundle,
    asynchrony: str,
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A race would fail the launch with the two source lines."""
    monkeypatch.setenv("KDTREE_SIMT_ASYNC", asynchrony)
    plain = digest(kernel_name, place.library.path, inputs(bundle))
    assert digest(kernel_name, host_build.product("race"), inputs(bundle)) == plain
    evidence(kernel=kernel_name, bundle=bundle.name)


def test_sanitizers_are_silent(
    place: Place, kernel_name: str, bundle: Bundle, bundle_path: Path, evidence: Evidence
) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer in a process of their own; either ends it with a report."""
    found = host_build.under_asan("phases.phase1.test_host_variants", kernel_name, str(bundle_path))
    assert found == digest(kernel_name, place.library.path, inputs(bundle))
    evidence(kernel=kernel_name, bundle=bundle.name)


if __name__ == "__main__":
    library_argument, kernel_argument, bundle_argument = sys.argv[1:]
    from pathlib import Path

    result = digest(kernel_argument, Path(library_argument), inputs(bundles.read(bundle_argument)))
    json.dump(result, sys.stdout)
