"""Phase 1: every dense kernel on every captured bundle is token-exact, and every control is noticed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kdtree_engine.ops.verify_attn import LSE_ABS, OUT_ROW_REL_L2
from phases import exactness

if TYPE_CHECKING:
    from collections.abc import Callable

    from kdtree_engine.bundle import Bundle
    from phases.places import Place

    Evidence = Callable[..., None]


def call(place: Place, kernel_name: str, bundle: Bundle) -> exactness.DenseVerifyAttn:
    return partial(place.verify_attn, kernel_name, d_latent=bundle.d_latent)


def test_token_exact(place: Place, kernel_name: str, bundle: Bundle, evidence: Evidence) -> None:
    verdict = exactness.evaluate(
        bundle,
        exactness.load_model(bundle),
        exactness.dense_attend(bundle, call(place, kernel_name, bundle)),
        kernel=kernel_name,
        place=place.name,
        out_row_rel_l2=OUT_ROW_REL_L2,
        lse_abs=LSE_ABS,
    )
    print(verdict.as_line())
    evidence(kernel=kernel_name, bundle=bundle.name, verdict=verdict.as_dict())
    assert verdict.token_exact, verdict.as_line()


def test_controls_are_detected(place: Place, kernel_name: str, bundle: Bundle, evidence: Evidence) -> None:
    """The kernel itself, given each wrong input in turn: a gate that lets one pass proves nothing."""
    controls = exactness.negative_controls(
        bundle,
        exactness.load_model(bundle),
        out_row_rel_l2=OUT_ROW_REL_L2,
        lse_abs=LSE_ABS,
        call=call(place, kernel_name, bundle),
    )
    for control in controls:
        print(control.as_line())
    evidence(kernel=kernel_name, bundle=bundle.name, controls=[control.as_dict() for control in controls])
    missed = [control.name for control in controls if control.applicable and not control.detected]
    assert not missed
    assert sum(control.applicable for control in controls) >= 5
