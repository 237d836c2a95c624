"""The comparator: what it reports, and that it reports nothing for equal arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kdtree_engine.compare import compare

SIZES = hnp.array_shapes(min_dims=1, max_dims=3, max_side=5)
ARRAYS = hnp.arrays(np.float64, SIZES, elements=st.floats(-1e6, 1e6).filter(lambda x: x == 0 or abs(x) > 1e-100))


@given(ARRAYS)
def test_equal_arrays_have_no_error(array: np.ndarray) -> None:
    result = compare(array, array.copy(), name="x")
    assert (result.rel_l2, result.row_rel_l2, result.max_abs, result.cosine) == (0, 0, 0, 0)
    assert result.worst_index is None
    assert result.within(row_rel_l2=0, max_abs=0)
    assert "equal" in result.report()


@given(ARRAYS, st.data())
def test_one_wrong_element_is_found(array: np.ndarray, data: st.DataObject) -> None:
    index = tuple(data.draw(st.integers(0, size - 1)) for size in array.shape)
    wrong = array.copy()
    wrong[index] += 1.0 + abs(wrong[index])
    result = compare(wrong, array, name="x")
    assert result.worst_index == index
    assert result.worst_actual == wrong[index]
    assert result.worst_expected == array[index]
    assert result.max_abs == abs(wrong[index] - array[index])


def test_figures_of_a_known_pair() -> None:
    expected = np.array([[3.0, 4.0], [0.0, 2.0]])
    actual = np.array([[3.0, 4.5], [0.0, 1.0]])
    result = compare(actual, expected, name="x")
    assert result.rel_l2 == pytest.approx((1.25 / 29) ** 0.5)
    assert result.row_rel_l2 == pytest.approx(0.5)
    assert result.worst_row == (1,)
    assert result.worst_index == (1, 1)
    # 1 - 2<x, y> / (<x, x> + <y, y>) with <x, y> = 29, <x, x> = 30.25, <y, y> = 29
    assert result.cosine == pytest.approx(1 - 2 * 29 / (30.25 + 29))


@pytest.mark.parametrize(
    ("actual", "expected", "nan", "inf"),
    [
        (np.nan, 1.0, 1, 0),
        (1.0, np.nan, 1, 0),
        (np.nan, np.inf, 1, 0),
        (np.inf, 1.0, 0, 1),
        (np.inf, -np.inf, 0, 1),
        (-np.inf, -np.inf, 0, 0),
        (np.nan, np.nan, 0, 0),
    ],
)
def test_nan_and_inf_places_come_first(actual: float, expected: float, nan: int, inf: int) -> None:
    result = compare(np.array([1.0, actual]), np.array([9.0, expected]), name="x")
    assert (result.nan_mismatch, result.inf_mismatch) == (nan, inf)
    if nan or inf:
        assert result.worst_index == (1,)
        assert not result.within(max_abs=np.inf)
        assert "differ" in result.report()
    else:
        assert result.worst_index == (0,)
        assert result.within(max_abs=8)


def test_anything_for_a_zero_row_is_infinitely_wrong() -> None:
    result = compare(np.array([[1e-30, 0.0]]), np.zeros((1, 2)), name="x")
    assert result.row_rel_l2 == np.inf
    assert compare(np.zeros((1, 2)), np.zeros((1, 2)), name="x").row_rel_l2 == 0


def test_float32_is_compared_in_float64() -> None:
    result = compare(np.array([1.0], np.float32), np.array([1.0 + 1e-12]), name="x")
    assert result.max_abs == pytest.approx(1e-12, rel=1e-3)


def test_other_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^out: shape \[2\]; expected \[3\]$"):
        compare(np.zeros(2), np.zeros(3), name="out")


def test_report_is_one_line_with_coordinates() -> None:
    report = compare(np.array([[0.0, 2.0]]), np.array([[0.0, 1.0]]), name="layers/0/out").report()
    assert report.startswith("layers/0/out: ")
    assert "[0, 1] got 2 expected 1" in report
    assert "\n" not in report
