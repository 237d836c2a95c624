"""What every kernel's gate asks about memory: same bits, and nothing written but the outputs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kdtree_engine.bundle import to_bfloat16

if TYPE_CHECKING:
    import numpy.typing as npt

    from phases.places import Place

    Array = npt.NDArray[Any]

GUARD = np.float32(-1234.5)
BAND = 4096


def assert_same_bits(actual: tuple[Array, Array], expected: tuple[Array, Array]) -> None:
    """out and lse are equal bit by bit, whatever their type."""
    for name, got, want in zip(("out", "lse"), actual, expected, strict=True):
        assert got.dtype == want.dtype
        bits = f"u{got.itemsize}"
        np.testing.assert_array_equal(
            np.ascontiguousarray(got).view(bits), np.ascontiguousarray(want).view(bits), err_msg=name
        )


class Guarded:
    """Memory at a place, full of garbage and between guard bands; as uint8, of NaN whatever is read from it."""

    def __init__(self, place: Place, shape: tuple[int, ...], dtype: str = "float32") -> None:
        self._place, self._size = place, math.prod(shape)
        guards = {"bfloat16": to_bfloat16(np.full(1, GUARD))[0], "uint8": np.uint8(0xFF)}
        self.guard = guards.get(dtype, GUARD)
        self._buffer = place.strided(np.full(self._size + 2 * BAND, self.guard))
        self.tensor = self._buffer[BAND : BAND + self._size].reshape(shape)

    def check(self, live: int | None = None) -> None:
        """All of the first `live` rows is written (all rows if None is given), nothing else is."""
        whole = self._place.array(self._buffer)
        rows = self.tensor.shape[0]
        end = BAND + self._size // rows * (rows if live is None else live)
        assert (whole[:BAND] == self.guard).all(), "written before the output"
        assert (whole[end:] == self.guard).all(), "written behind the live part of the output"
        assert (whole[BAND:end] != self.guard).all(), "a part of the output is not written"

    def check_bands(self) -> None:
        """Nothing outside is written."""
        whole = self._place.array(self._buffer)
        assert (whole[:BAND] == self.guard).all(), "written before the memory"
        assert (whole[BAND + self._size :] == self.guard).all(), "written behind the memory"
