"""Phase 2: the paged kernels themselves, given wrong inputs: a gate that lets one pass proves nothing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from phases import exactness
from phases.paged import behind_the_dense_interface
from phases.phase2.test_parity import BOUNDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kdtree_engine.bundle import Bundle
    from phases.places import Place

    Evidence = Callable[..., None]

OPS = ("verify_attn_paged",)


def test_controls_are_detected(place: Place, kernel_name: str, bundle: Bundle, evidence: Evidence) -> None:
    call = behind_the_dense_interface(bundle, partial(place.verify_attn_paged, kernel_name))
    controls = exactness.negative_controls(bundle, exactness.load_model(bundle), call=call, **BOUNDS)
    for control in controls:
        print(control.as_line())
    evidence(kernel=kernel_name, bundle=bundle.name, controls=[control.as_dict() for control in controls])
    missed = [control.name for control in controls if control.applicable and not control.detected]
    assert not missed
    assert sum(control.applicable for control in controls) >= 5
