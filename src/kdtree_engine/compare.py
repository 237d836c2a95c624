"""The comparator: how far an array is from the right one, and where. It knows no tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Comparison:
    """How `actual` differs from `expected`.

    Places where the two differ in being NaN, or in being an infinity of one sign, are counted apart; every other figure
    is over the places that are finite in both. A row is a vector along the last axis.
    """

    name: str
    shape: tuple[int, ...]
    nan_mismatch: int  # places that are NaN in exactly one of the two
    inf_mismatch: int  # places that hold an infinity in one and not the same one in the other
    first_mismatch: tuple[int, ...] | None  # the first of those places
    rel_l2: float  # ||actual - expected|| / ||expected||
    row_rel_l2: float  # the worst row's
    worst_row: tuple[int, ...] | None
    max_abs: float  # the largest |actual - expected|
    worst_index: tuple[int, ...] | None  # where it is; a mismatched place if there is one
    worst_actual: float
    worst_expected: float
    cosine: float  # 1 - 2<x, y> / (<x, x> + <y, y>): 0 for equal arrays

    @property
    def same_places(self) -> bool:
        """Whether NaNs and infinities lie in the same places."""
        return not (self.nan_mismatch or self.inf_mismatch)

    def within(
        self, *, rel_l2: float | None = None, row_rel_l2: float | None = None, max_abs: float | None = None
    ) -> bool:
        """Whether NaNs and infinities match and every bound that is given holds."""
        return (
            self.same_places
            and (rel_l2 is None or self.rel_l2 <= rel_l2)
            and (row_rel_l2 is None or self.row_rel_l2 <= row_rel_l2)
            and (max_abs is None or self.max_abs <= max_abs)
        )

    def report(self) -> str:
        """One line for people."""
        if self.worst_index is None:
            return f"{self.name}: equal, shape {list(self.shape)}"
        where = f"worst {list(self.worst_index)} got {self.worst_actual:.9g} expected {self.worst_expected:.9g}"
        places = "" if self.same_places else f"{self.nan_mismatch} NaN and {self.inf_mismatch} inf places differ, "
        row = "" if self.worst_row is None else f" at {list(self.worst_row)}"
        return (
            f"{self.name}: {places}relL2 {self.rel_l2:.3g}, row relL2 {self.row_rel_l2:.3g}{row}, "
            f"max abs {self.max_abs:.3g}, cosine {self.cosine:.3g}, {where}"
        )


def compare(actual: Array, expected: Array, *, name: str) -> Comparison:
    """Compare two arrays of one shape in float64; ValueError if the shapes differ."""
    if actual.shape != expected.shape:
        raise ValueError(f"{name}: shape {list(actual.shape)}; expected {list(expected.shape)}")
    x, y = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    nan_differs = np.isnan(x) != np.isnan(y)
    inf_differs = (np.isinf(x) | np.isinf(y)) & (x != y) & ~nan_differs
    mismatch = np.argwhere(nan_differs | inf_differs)
    finite = np.isfinite(x) & np.isfinite(y)
    x_finite, y_finite = np.where(finite, x, 0.0), np.where(finite, y, 0.0)
    difference = np.abs(x_finite - y_finite)
    row_errors = _ratio(_row_norm(difference), _row_norm(y_finite))
    worst: tuple[int, ...] | None = None
    if mismatch.size:
        worst = tuple(mismatch[0].tolist())
    elif difference.size and difference.max() > 0:
        worst = _unravel(int(difference.argmax()), difference.shape)
    row_worst = float(row_errors.max(initial=0.0))
    energy = float((x_finite**2).sum() + (y_finite**2).sum())
    return Comparison(
        name=name,
        shape=x.shape,
        nan_mismatch=int(nan_differs.sum()),
        inf_mismatch=int(inf_differs.sum()),
        first_mismatch=tuple(mismatch[0].tolist()) if mismatch.size else None,
        rel_l2=float(_ratio(np.linalg.norm(difference), np.linalg.norm(y_finite))),
        row_rel_l2=row_worst,
        worst_row=_unravel(int(row_errors.argmax()), row_errors.shape) if row_worst > 0 else None,
        max_abs=float(difference.max(initial=0.0)),
        worst_index=worst,
        worst_actual=float(x[worst]) if worst is not None else 0.0,
        worst_expected=float(y[worst]) if worst is not None else 0.0,
        # (x - y)^2 / (x^2 + y^2) is the same number without the cancellation of 1 - 2xy/(...).
        cosine=float((difference**2).sum() / energy) if energy else 0.0,
    )


def _row_norm(values: Array) -> Array:
    norm: Array = np.sqrt((np.atleast_1d(values) ** 2).sum(axis=-1))
    return norm


def _ratio(error: Any, size: Any) -> Array:
    """error / size; infinite where a wrong value stands for zero, 0 where both are zero."""
    error, size = np.asarray(error, np.float64), np.asarray(size, np.float64)
    infinite_or_zero = np.where(error > 0, np.inf, 0.0)
    ratio: Array = np.where(size > 0, error / np.where(size > 0, size, 1.0), infinite_or_zero)
    return ratio


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(index, shape))
