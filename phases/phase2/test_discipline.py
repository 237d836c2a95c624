"""Phase 2: what a paged kernel must not read, must not write, and must do the same way twice."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine import verify_attn_paged, verify_attn_paged_workspace_size
from oracle.verify_attn_paged import verify_attn_paged as verify_attn_paged_oracle
from phases.discipline import Guarded, assert_same_bits
from phases.paged import Case, as_floats, problems

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from phases.places import Place

    Array = npt.NDArray[Any]
    Evidence = Callable[..., None]

OPS = ("verify_attn_paged",)

# Each row tile, layout and form; a request without nodes, one without a prefix, and garbage behind every live part.
CASES = [
    Case((2, 0, 3), (40, 7, 0), 2, form="mask_bits", pool_drafts=True),
    Case((9, 1, 5), (70, 33, 2), 4, form="full_mask", strided=True),
    Case((17, 0, 20), (33, 5, 100), 8, tree="any", page_size=16, pool_drafts=True, strided=True),
    Case((65, 3), (20, 50), 2, tree="any", form="mask_bits", page_size=64, split_tokens=32),
    Case((40,), (64,), 5, form="parents", out_dtype="float32", split_tokens=16),
]


def run(place: Place, kernel: str, case: Case, poison: float, **changes: Any) -> tuple[Array, Array]:
    """Live rows of the result."""
    out, lse = place.verify_attn_paged(kernel, **case.inputs(poison) | changes, **case.options())
    return out[case.live], lse[case.live]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twice_is_bit_equal(place: Place, kernel_name: str, case: Case, evidence: Evidence) -> None:
    assert_same_bits(run(place, kernel_name, case, 0.0), run(place, kernel_name, case, 0.0))
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("poison", [math.nan, 1e30, math.inf], ids=["nan", "1e30", "inf"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_poison_is_not_read(place: Place, kernel_name: str, case: Case, poison: float, evidence: Evidence) -> None:
    """In every slot, page tail, spare row and gap, and in the drafts that nobody sees.

    NaN spreads through arithmetic, 1e30 through a maximum that drops NaN, inf through 0 * inf.
    """
    assert_same_bits(run(place, kernel_name, case, poison), run(place, kernel_name, case, 0.0))
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_hidden_draft_harms_only_those_who_see_it(
    place: Place, kernel_name: str, case: Case, poison: float, evidence: Evidence
) -> None:
    """Every request's last draft is poisoned: rows that see it are not finite, all others keep their bits."""
    poisoned, sees = case.last_drafts(poison)
    out, lse = run(place, kernel_name, case, poison, **poisoned)
    clean = run(place, kernel_name, case, poison)
    assert not np.isfinite(as_floats(out[sees])).all(axis=-1).any()
    assert_same_bits((out[~sees], lse[~sees]), (clean[0][~sees], clean[1][~sees]))
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_the_outputs_are_written(place: Place, kernel_name: str, case: Case, evidence: Evidence) -> None:
    """Outputs lie between guard bands, start as garbage, and are written wholly, but for the rows of no request.

    The workspace holds NaN and ends where the size query says; inputs stay as they are.
    """
    inputs, options = case.inputs(), case.options()
    given = {name: place.given(value) for name, value in inputs.items()}
    rows = inputs["q"].shape[:2]
    out, lse = Guarded(place, (*rows, case.d_latent), case.out_dtype), Guarded(place, rows)
    size = verify_attn_paged_workspace_size(
        batch=len(inputs["qo_indptr"]) - 1,
        total_q=rows[0],
        num_heads=rows[1],
        d_latent=case.d_latent,
        d_rope=case.d_rope,
        **{name: value for name, value in options.items() if name != "out_dtype"},
        library=place.library,
    )
    workspace = Guarded(place, (size,), "uint8")
    verify_attn_paged(
        **given,
        **options,
        kernel=kernel_name,
        out=out.tensor,
        lse=lse.tensor,
        workspace=workspace.tensor,
        library=place.library,
    )
    out.check(case.live.stop)
    lse.check(case.live.stop)
    workspace.check_bands()
    live = case.live
    actual = place.array(out.tensor)[live], place.array(lse.tensor)[live]
    assert_same_bits(actual, run(place, kernel_name, case, math.nan))
    for name, tensor in given.items():
        if isinstance(inputs[name], np.ndarray):
            assert place.array(tensor).tobytes() == np.ascontiguousarray(case.inputs()[name]).tobytes(), name
    evidence(kernel=kernel_name)


def select(inputs: dict[str, Any], order: list[int]) -> dict[str, Any]:
    """The batch of these requests, for the layout with kv_indices, draft_slots and mask_bits."""
    nodes = [slice(*inputs["qo_indptr"][b : b + 2]) for b in order]
    prefixes = [slice(*inputs["kv_indptr"][b : b + 2]) for b in order]

    def gather(name: str, slices: list[slice]) -> Array:
        return np.concatenate([inputs[name][own] for own in slices])

    def indptr(slices: list[slice]) -> Array:
        return np.cumsum([0, *(own.stop - own.start for own in slices)]).astype(np.int32)

    chosen = {name: gather(name, nodes) for name in ("q", "draft_slots", "mask_bits")}
    indices = {"kv_indices": gather("kv_indices", prefixes)}
    return inputs | chosen | indices | {"qo_indptr": indptr(nodes), "kv_indptr": indptr(prefixes)}


@pytest.mark.parametrize("split_tokens", [16, 64])
def test_alone_is_bit_equal_to_in_the_batch(
    place: Place, kernel_name: str, split_tokens: int, evidence: Evidence
) -> None:
    """With split_tokens fixed a request keeps its bits in any company: alone, and among copies in another order."""
    case = Case(
        (9, 1, 0, 33, 2), (70, 0, 5, 200, 131), 5, form="mask_bits", pool_drafts=True, split_tokens=split_tokens
    )
    inputs, options = case.inputs(), case.options()
    out, lse = place.verify_attn_paged(kernel_name, **inputs, **options)

    def expected(order: list[int]) -> tuple[Array, Array]:
        rows = np.concatenate([np.arange(*inputs["qo_indptr"][b : b + 2]) for b in order])
        return out[rows], lse[rows]

    for order in ([0], [1], [3], [4], [4, 3, 2, 1, 0] * 3):
        assert_same_bits(place.verify_attn_paged(kernel_name, **select(inputs, order), **options), expected(order))
    evidence(kernel=kernel_name)


def test_a_batch_inside_larger_arrays(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """qo_indptr and kv_indptr need not begin at 0: one request out of a batch, where it lies."""
    case = dataclasses.replace(CASES[0], nodes=(2, 9, 3), prefix=(40, 33, 0))
    inputs, options = case.inputs(), case.options() | {"split_tokens": 32}
    out, lse = place.verify_attn_paged(kernel_name, **inputs, **options)
    middle = {name: inputs[name][1:3] for name in ("qo_indptr", "kv_indptr")}
    own_out, own_lse = place.verify_attn_paged(kernel_name, **inputs | middle, **options)
    assert_same_bits((own_out[2:11], own_lse[2:11]), (out[2:11], lse[2:11]))
    evidence(kernel=kernel_name)


def test_requests_that_are_too_large_are_left_out(place: Place, kernel_name: str, evidence: Evidence) -> None:
    case = Case((2, 5, 3), (40, 33, 20), 4, form="mask_bits")
    rows = case.inputs()["q"].shape[:2]
    out, lse = Guarded(place, (*rows, case.d_latent), case.out_dtype), Guarded(place, rows)
    given = {name: place.given(value) for name, value in case.inputs().items()}
    outputs = {"out": out.tensor, "lse": lse.tensor}
    verify_attn_paged(**given, **outputs, max_q_len=4, kernel=kernel_name, library=place.library)
    right = case.answer()
    for output, name in ((out, "out"), (lse, "lse")):
        output.check_bands()
        assert (place.array(output.tensor)[2:7] == output.guard).all(), f"{name} of the request that is too large"
    for first, last in ((0, 2), (7, 10)):
        own = slice(first, last)
        actual = place.array(out.tensor)[own], place.array(lse.tensor)[own]
        found, _ = problems(actual, (right[0][own], right[1][own]))
        assert not found, found
    evidence(kernel=kernel_name)


SLOTS: dict[str, Any] = {"form": "mask_bits", "pool_drafts": True, "split_tokens": 32}


@pytest.mark.parametrize(
    ("name", "position", "value"),
    [
        ("qo_indptr", -1, 10**6),
        ("qo_indptr", -1, 0),
        ("qo_indptr", 0, -5),
        ("kv_indptr", -1, 10**6),
        ("kv_indptr", -1, 0),
        ("kv_indptr", 0, -(10**6)),
        ("mask_bits", 3, 0),
    ],
)
def test_contents_out_of_range_harm_no_other_request(
    place: Place, kernel_name: str, name: str, position: int, value: int, evidence: Evidence
) -> None:
    """Contents of device arrays cannot be checked without reading them: what they spoil is their own request's."""
    case = Case((2, 3, 4), (20, 33, 10), 2, **SLOTS)
    spoiled = {0: 0, 3: 1, -1: 2}[position]
    inputs = case.inputs()
    clean = place.verify_attn_paged(kernel_name, **inputs, **case.options())
    inputs[name][position] = value
    out, lse = place.verify_attn_paged(kernel_name, **inputs, **case.options())
    others = np.concatenate([np.arange(*case.inputs()["qo_indptr"][b : b + 2]) for b in range(3) if b != spoiled])
    assert_same_bits((out[others], lse[others]), (clean[0][others], clean[1][others]))
    evidence(kernel=kernel_name)


@pytest.mark.parametrize(
    ("layout", "name", "position", "value"),
    [
        ({}, "kv_indices", 2, -1),
        ({}, "kv_indices", 25, 2**31 - 1),
        ({}, "kv_indices", 25, -(2**31)),
        ({}, "draft_slots", 3, -1),
        ({"int64": ("kv_indices",)}, "kv_indices", 25, 2**31 + 3),
        ({"int64": ("kv_indices",)}, "kv_indices", 2, -5),
        ({"int64": ("draft_slots",)}, "draft_slots", 3, 2**31 + 3),
        ({"page_size": 16}, "page_table", (0, 1), -1),
        ({"page_size": 256}, "page_table", (1, 0), -1),
        ({"page_size": 64, "int64": ("page_table",)}, "page_table", (1, 0), 2**20),
        ({"page_size": 16}, "page_table", (1, 0), 2**31 - 1),
    ],
    ids=str,
)
def test_slots_outside_the_pool_hold_zeros(
    place: Place,
    kernel_name: str,
    layout: dict[str, Any],
    name: str,
    position: int | tuple[int, int],
    value: int,
    evidence: Evidence,
) -> None:
    """They are not read. (Of 64-bit entries of kv_indices and page tables the lower half counts, as capi.h says.)"""
    case = Case((2, 3, 4), (20, 33, 10), 2, **SLOTS | layout)
    inputs = case.inputs()
    inputs[name][position] = value
    out, lse = verify_attn_paged_oracle(**inputs)
    actual = place.verify_attn_paged(kernel_name, **inputs, **case.options())
    live = case.live
    found, figures = problems((actual[0][live], actual[1][live]), (out[live], lse[live]))
    evidence(kernel=kernel_name, **figures)
    assert not found, found
