"""Phase 2: merge_partials against its float64 oracle and closed forms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine import merge_partials
from kdtree_engine.bundle import to_bfloat16
from kdtree_engine.compare import compare
from kdtree_engine.ops.merge_partials import LSE_ABS, OUT_ROW_REL_L2
from oracle.merge_partials import merge_partials as merge_partials_oracle
from phases.discipline import Guarded, assert_same_bits
from phases.paged import as_floats

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from phases.places import Place

    Array = npt.NDArray[Any]
    Evidence = Callable[..., None]

OPS = ("merge_partials",)


@dataclass(frozen=True)
class Case:
    """Parts of random rows, of which a third has seen nothing; the first row has not in any part."""

    parts: int
    rows: tuple[int, ...] = (3, 7)
    d_latent: int = 512
    in_type: str = "float32"
    out_type: str = "float32"
    spread: float = 3.0  # standard deviation of the parts' lse

    def __str__(self) -> str:
        rows = "x".join(map(str, self.rows))
        return f"{self.parts}x{rows}x{self.d_latent},{self.in_type}-{self.out_type},spread={self.spread:g}"

    def inputs(self, poison: float = math.nan) -> tuple[Array, Array]:
        """outs and lses; `poison` fills what must not be read."""
        rng = np.random.default_rng([self.parts, *self.rows, self.d_latent])
        outs = rng.standard_normal((self.parts, *self.rows, self.d_latent), np.float32)
        lses = rng.normal(0.0, self.spread, (self.parts, *self.rows)).astype(np.float32)
        unseen = rng.random(lses.shape) < 1 / 3
        unseen.reshape(self.parts, -1)[:, 0] = True
        lses[unseen] = -np.inf
        outs[unseen] = poison
        return (to_bfloat16(outs) if self.in_type == "bfloat16" else outs), lses


CASES = [
    *(Case(parts, in_type=type_) for parts in (1, 2, 3, 8, 130) for type_ in ("bfloat16", "float32")),
    *(Case(parts, (5,), 256, "bfloat16", "bfloat16") for parts in (1, 2, 33)),
    Case(8, (2, 1, 9), 256),
    Case(8, (19,), 512, "float32", "bfloat16"),
    Case(8, (4, 4), 512, "bfloat16", "bfloat16"),
    Case(3, (), 512),  # one row, and nobody has seen anything
    Case(8, (100,), spread=0.01),
    Case(8, (100,), spread=20.0),
    Case(1024, (2,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(place: Place, kernel_name: str, case: Case, evidence: Evidence) -> None:
    outs, lses = case.inputs()
    out, lse = place.merge_partials(outs, lses, out_dtype=case.out_type)
    right_out, right_lse = merge_partials_oracle(outs, lses)
    rows, logs = compare(as_floats(out), right_out, name="out"), compare(lse, right_lse, name="lse")
    evidence(kernel=kernel_name, out_row_rel_l2=rows.row_rel_l2, lse_max_abs=logs.max_abs)
    assert rows.within(row_rel_l2=OUT_ROW_REL_L2[case.out_type]), rows.report()
    assert logs.within(max_abs=LSE_ABS), logs.report()
    assert (out[np.isneginf(right_lse)] == 0).all()


@pytest.mark.parametrize("type_", ["bfloat16", "float32"])
def test_one_part_is_the_result(place: Place, kernel_name: str, type_: str, evidence: Evidence) -> None:
    """Among parts that saw nothing, or alone: to the bit."""
    rng = np.random.default_rng(20260711)
    row = rng.standard_normal((6, 512), np.float32)
    only = to_bfloat16(row) if type_ == "bfloat16" else row
    lse = rng.normal(0.0, 30.0, 6).astype(np.float32)
    outs = np.stack([np.full_like(only, to_bfloat16(np.full(1, np.nan))[0] if type_ == "bfloat16" else np.nan)] * 4)
    lses = np.full((4, 6), -np.inf, np.float32)
    outs[2], lses[2] = only, lse
    for given in ((outs, lses), (outs[2:3], lses[2:3])):
        assert_same_bits(place.merge_partials(*given), (only, lse))
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("top", [0.0, 60.0, -1e4, 1e30])
@pytest.mark.parametrize("gap", [0.0, 1.0, 30.0, 100.0, 1e4, 3e38, math.inf])
def test_two_parts(place: Place, kernel_name: str, top: float, gap: float, evidence: Evidence) -> None:
    """Closed form: the first part's weight is the logistic function of the gap, however large the two lse are."""
    lses = np.array([top, top - gap], np.float32)
    exact = float(lses[0]) - float(lses[1])
    outs = np.zeros((2, 256), np.float32)
    outs[0, 0] = outs[1, 1] = 1.0  # tell the parts apart
    first = 1.0 / (1.0 + math.exp(-exact))
    for order in (slice(None), slice(None, None, -1)):
        out, lse = place.merge_partials(outs[order].copy(), lses[order].copy())
        np.testing.assert_allclose(out[:2], [first, math.exp(-exact) * first], rtol=1e-5, atol=1e-37)
        np.testing.assert_allclose(lse, top + math.log1p(math.exp(-exact)), rtol=1e-6, atol=1e-7)
        assert (out[2:] == 0.0).all()
    evidence(kernel=kernel_name)


def test_every_part_counts_once(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """Closed form at the most parts: with equal lse each weighs 1 / 1024, and the merged lse is larger by ln 1024.

    Column c holds the parts' c-th binary digit, so a part that is dropped or counted twice shows.
    """
    outs = np.zeros((1024, 1, 512), np.float32)
    outs[:, 0, :10] = np.arange(1024)[:, None] >> np.arange(10) & 1
    outs[:, 0, 10] = 1.0
    out, lse = place.merge_partials(outs, np.full((1024, 1), -7.0, np.float32))
    assert (out[0, :10] == 0.5).all()
    assert (out[0, 10:] == [1.0, *[0.0] * 501]).all()
    np.testing.assert_allclose(lse, math.log(1024) - 7.0, rtol=1e-6)
    evidence(kernel=kernel_name)


BATCH = Case(9, (37,), 512, "bfloat16", "bfloat16")


def test_bits_depend_on_the_row_alone(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """Twice the same, and the same without its neighbours or at another place."""
    outs, lses = BATCH.inputs()
    out, lse = place.merge_partials(outs, lses)
    assert_same_bits(place.merge_partials(outs, lses), (out, lse))
    for rows in ([5], [36, 0, 9], np.arange(37)[::-1]):
        assert_same_bits(place.merge_partials(outs[:, rows].copy(), lses[:, rows].copy()), (out[rows], lse[rows]))
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("poison", [1e30, math.inf], ids=["1e30", "inf"])
def test_unseen_parts_are_not_read(place: Place, kernel_name: str, poison: float, evidence: Evidence) -> None:
    assert_same_bits(place.merge_partials(*BATCH.inputs(poison)), place.merge_partials(*BATCH.inputs(0.0)))
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("type_", ["bfloat16", "float32"])
def test_only_the_outputs_are_written(place: Place, kernel_name: str, type_: str, evidence: Evidence) -> None:
    """Outputs lie between guard bands, start as garbage and are written wholly; out names its own type."""
    outs, lses = BATCH.inputs()
    given = place.strided(outs), place.strided(lses)
    out, lse = Guarded(place, (37, 512), type_), Guarded(place, (37,))
    merge_partials(*given, out=out.tensor, lse=lse.tensor, library=place.library)
    out.check()
    lse.check()
    for tensor, array in zip(given, (outs, lses), strict=True):
        np.testing.assert_array_equal(place.array(tensor), array)
    assert_same_bits(
        (place.array(out.tensor), place.array(lse.tensor)), place.merge_partials(outs, lses, out_dtype=type_)
    )
    evidence(kernel=kernel_name)


def test_addresses_beyond_32_bits(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """More than 2^31 elements, most of them in parts that saw nothing; on the host they take no memory."""
    parts, rows, d_latent = 1024, 4200, 512
    assert parts * rows * d_latent > 2**31
    outs = np.zeros((parts, rows, d_latent), np.uint16)
    lses = np.full((parts, rows), -np.inf, np.float32)
    rng = np.random.default_rng(20260712)
    for part in (0, parts - 1):
        outs[part] = to_bfloat16(rng.standard_normal((rows, d_latent), np.float32))
        lses[part] = rng.standard_normal(rows)
    near = [0, parts - 1]
    assert_same_bits(place.merge_partials(outs, lses), place.merge_partials(outs[near], lses[near]))
    evidence(kernel=kernel_name)


def test_more_rows_than_a_grid_has(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """Each row of a single part comes back, also where a block takes several."""
    rows = 8 * 8192 + 11
    outs = np.random.default_rng(20260713).integers(0, 0x7F80, (1, rows, 256), np.uint16)
    lses = np.arange(rows, dtype=np.float32)[None]
    assert_same_bits(place.merge_partials(outs, lses), (outs[0], lses[0]))
    evidence(kernel=kernel_name)
