"""Phase 1: what a kernel must not read, must not write, and must do the same way twice."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine import verify_attn
from phases.discipline import Guarded, assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kdtree_engine.bundle import Bundle
    from phases.places import Place

    Array = npt.NDArray[Any]
    Evidence = Callable[..., None]


def dense(bundle: Bundle, poison: float) -> dict[str, Any]:
    """Inputs of layer 0, with `poison` in the padded keys and in every key that no node of its request sees."""
    inputs = bundle.dense(0, poison)
    unseen = inputs["mask"].max(axis=1) == 0
    inputs["kv"][unseen] = poison
    return {**inputs, "sm_scale": bundle.sm_scale, "d_latent": bundle.d_latent}


def test_twice_is_bit_equal(place: Place, kernel_name: str, bundle: Bundle, evidence: Evidence) -> None:
    inputs = dense(bundle, 0.0)
    first = place.verify_attn(kernel_name, **inputs)
    assert_same_bits(place.verify_attn(kernel_name, **inputs), first)
    evidence(kernel=kernel_name, bundle=bundle.name)


@pytest.mark.parametrize("poison", [math.nan, 1e30, math.inf], ids=["nan", "1e30", "inf"])
def test_poison_is_not_read(place: Place, kernel_name: str, bundle: Bundle, poison: float, evidence: Evidence) -> None:
    """NaN spreads through arithmetic, 1e30 through a maximum that drops NaN, inf through 0 * inf."""
    clean = place.verify_attn(kernel_name, **dense(bundle, 0.0))
    assert_same_bits(place.verify_attn(kernel_name, **dense(bundle, poison)), clean)
    evidence(kernel=kernel_name, bundle=bundle.name)


@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_hidden_key_harms_only_those_who_see_it(
    place: Place, kernel_name: str, bundle: Bundle, poison: float, evidence: Evidence
) -> None:
    """The last node's key is poisoned: rows that see it are not finite, all others keep their bits."""
    inputs = dense(bundle, 0.0)
    clean = place.verify_attn(kernel_name, **inputs)
    last = inputs["kv_len"] - 1
    inputs["kv"][np.arange(bundle.batch), last] = poison
    out, lse = place.verify_attn(kernel_name, **inputs)
    sees = np.stack([inputs["mask"][b, :, last[b]] != 0 for b in range(bundle.batch)])
    assert not np.isfinite(out[sees]).all(axis=-1).any()
    assert_same_bits((out[~sees], lse[~sees]), (clean[0][~sees], clean[1][~sees]))
    evidence(kernel=kernel_name, bundle=bundle.name)


def test_only_the_outputs_are_written(place: Place, kernel_name: str, bundle: Bundle, evidence: Evidence) -> None:
    """Outputs lie between guard bands, start as garbage, and are written wholly; inputs stay as they are."""
    inputs = dense(bundle, math.nan)
    given = {name: place.tensor(inputs[name]) for name in ("q", "kv", "mask", "kv_len")}
    rows = inputs["q"].shape[:3]
    guarded = Guarded(place, (*rows, bundle.d_latent)), Guarded(place, rows)
    out, lse = verify_attn(
        given["q"],
        given["kv"],
        mask=given["mask"],
        kv_len=given["kv_len"],
        sm_scale=bundle.sm_scale,
        d_latent=bundle.d_latent,
        kernel=kernel_name,
        out=guarded[0].tensor,
        lse=guarded[1].tensor,
        library=place.library,
    )
    for output in guarded:
        output.check()
    assert_same_bits((place.array(out), place.array(lse)), place.verify_attn(kernel_name, **inputs))
    for name, tensor in given.items():
        np.testing.assert_array_equal(place.array(tensor), inputs[name], err_msg=name)
    evidence(kernel=kernel_name, bundle=bundle.name)


def test_alone_is_bit_equal_to_in_the_batch(place: Place, kernel_name: str, bundle: Bundle, evidence: Evidence) -> None:
    """A request keeps its bits in any company: alone, and among copies of the whole batch in another order."""
    inputs = dense(bundle, math.nan)
    together = place.verify_attn(kernel_name, **inputs)
    per_request = ("q", "kv", "mask", "kv_len")
    for b in range(bundle.batch):
        alone = inputs | {name: inputs[name][b : b + 1] for name in per_request}
        assert_same_bits(place.verify_attn(kernel_name, **alone), (together[0][b : b + 1], together[1][b : b + 1]))
    order = np.arange(bundle.batch).repeat(2)[::-1]
    crowd = inputs | {name: inputs[name][order] for name in per_request}
    assert_same_bits(place.verify_attn(kernel_name, **crowd), (together[0][order], together[1][order]))
    evidence(kernel=kernel_name, bundle=bundle.name)
