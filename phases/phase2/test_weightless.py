"""Phase 2: bundles without weights, as a server captures them: the attention alone, T0 against the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kdtree_engine import bundle as bundles
from kdtree_engine.evidence import WEIGHTLESS
from phases import exactness
from phases.bundles import WEIGHTLESS as FOLDER
from phases.phase2.test_parity import BOUNDS, LAYOUTS, OPS, call

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from phases.places import Place

    Evidence = Callable[..., None]

__all__ = ["OPS"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", bundles.find(FOLDER), ids=lambda path: path.stem)
def test_attention_is_the_oracles(place: Place, kernel_name: str, path: Path, layout: str, evidence: Evidence) -> None:
    bundle = exactness.with_outputs(bundles.read(path))
    attend = exactness.dense_attend(bundle, call(place, kernel_name, bundle, **LAYOUTS[layout]))
    bounds = {name: bound for name, bound in BOUNDS.items() if name != "dtype"}
    failures, comparisons = exactness.numeric(bundle, attend, **bounds)
    worst = max(found.row_rel_l2 for found in comparisons if found.name.endswith("/out"))
    evidence(kernel=kernel_name, bundle=WEIGHTLESS + bundle.name, layout=layout, t0=not failures, out_row_rel_l2=worst)
    assert not failures, "; ".join(failures)
