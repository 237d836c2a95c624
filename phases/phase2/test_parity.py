"""Phase 2: every paged kernel on every captured bundle is token-exact.

merge_partials is judged as decode context parallelism uses it: the attention of three ranks, merged.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kdtree_engine.ops.verify_attn_paged import LSE_ABS, OUT_REL_L2, OUT_ROW_REL_L2
from phases import exactness
from phases.paged import behind_the_dense_interface

if TYPE_CHECKING:
    from collections.abc import Callable

    from kdtree_engine.bundle import Bundle
    from phases.places import Place

    Evidence = Callable[..., None]

OPS = ("verify_attn_paged", "merge_partials")
BOUNDS: dict[str, Any] = {
    "out_rel_l2": OUT_REL_L2,
    "out_row_rel_l2": OUT_ROW_REL_L2,
    "lse_abs": LSE_ABS,
    "dtype": "bfloat16",
}
LAYOUTS: dict[str, dict[str, Any]] = {"slots": {}, "pages": {"page_size": 64, "form": "full_mask"}}


def call(place: Place, kernel_name: str, bundle: Bundle, **layout: Any) -> exactness.DenseVerifyAttn:
    if kernel_name == "merge_partials":
        return behind_the_dense_interface(bundle, partial(place.in_parts, 3), **layout)
    return behind_the_dense_interface(bundle, partial(place.verify_attn_paged, kernel_name), **layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_exact(place: Place, kernel_name: str, bundle: Bundle, layout: str, evidence: Evidence) -> None:
    verdict = exactness.evaluate(
        bundle,
        exactness.load_model(bundle),
        exactness.dense_attend(bundle, call(place, kernel_name, bundle, **LAYOUTS[layout])),
        kernel=kernel_name,
        place=place.name,
        **BOUNDS,
    )
    print(verdict.as_line())
    evidence(kernel=kernel_name, bundle=bundle.name, layout=layout, verdict=verdict.as_dict())
    assert verdict.token_exact, verdict.as_line()
