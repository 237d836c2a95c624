"""Phase 2: ranks that each hold a part of the context, merged, give what one that holds it all gives."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kdtree_engine import bundle as bundles
from phases import exactness
from phases.conftest import BUNDLES
from phases.paged import Case, behind_the_dense_interface, problems

if TYPE_CHECKING:
    from collections.abc import Callable

    from phases.places import Place

    Evidence = Callable[..., None]

OPS = ("merge_partials",)


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("layout", [{}, {"page_size": 16, "form": "full_mask"}], ids=["slots", "pages"])
def test_parts_of_a_bundle(
    place: Place, kernel_name: str, count: int, layout: dict[str, Any], evidence: Evidence
) -> None:
    """Against the ragged bundle's answers: 63 and 257 keys do not divide evenly, 0 and 1 leave ranks empty."""
    bundle = bundles.read(BUNDLES / "ragged_page64.h5")
    call = behind_the_dense_interface(bundle, partial(place.in_parts, count), **layout)
    attend = exactness.dense_attend(bundle, call)
    for index, layer in enumerate(bundle.layers):
        assert layer.out is not None
        assert layer.lse is not None
        found, figures = problems(
            attend(index, bundles.from_bfloat16(layer.q), bundles.from_bfloat16(layer.kv)), (layer.out, layer.lse)
        )
        evidence(kernel=kernel_name, bundle=bundle.name, parts=count, **figures)
        assert not found, found


CASES = [
    Case((9, 0, 3), (70, 5, 0), 5, tree="any", form="mask_bits", pool_drafts=True),
    Case((17,), (33,), 4, page_size=16, form="parents"),
    Case((2, 1), (1, 2), 4, 256, 64),
]


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_of_a_batch(place: Place, kernel_name: str, case: Case, count: int, evidence: Evidence) -> None:
    """Also nodes that see nothing in one part, or in any."""
    out, lse = place.in_parts(count, **case.inputs())
    found, figures = problems((out[case.live], lse[case.live]), case.answer())
    evidence(kernel=kernel_name, parts=count, **figures)
    assert not found, found
