"""What NumPy and torch spell differently, so that the loop and its models are written once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from kdtree_engine.bundle import to_bfloat16
from kdtree_engine.errors import DecodeError

if TYPE_CHECKING:
    import numpy.typing as npt

    NumpyArray = npt.NDArray[Any]


class Arrays(Protocol):
    """A place for tensors: `xp` is numpy or torch, as far as they agree."""

    xp: Any

    def array(self, values: NumpyArray) -> Any:
        """A NumPy array as a tensor here."""

    def host(self, tensor: Any) -> NumpyArray:
        """A tensor as a NumPy array; waits for the device."""

    def bfloat16(self, values: Any) -> Any:
        """float32 rounded to bfloat16, dense; in NumPy its bits as uint16."""

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """bfloat16."""

    def best(self, rows: Any, count: int) -> tuple[Any, Any]:
        """The `count` largest of the last axis and their indices int32; of equals the lower index first."""


class NumpyArrays:
    """The host."""

    xp: Any = np

    def array(self, values: NumpyArray) -> Any:
        return values

    def host(self, tensor: Any) -> NumpyArray:
        return np.asarray(tensor)

    def bfloat16(self, values: Any) -> Any:
        return to_bfloat16(values)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape, np.uint16)

    def best(self, rows: Any, count: int) -> tuple[Any, Any]:
        ids = np.argsort(-rows, axis=-1, kind="stable")[..., :count]
        return np.take_along_axis(rows, ids, -1), ids.astype(np.int32)


class TorchArrays:
    """A CUDA device through torch."""

    def __init__(self) -> None:
        import torch

        self.xp: Any = torch

    def array(self, values: NumpyArray) -> Any:
        return self.xp.from_numpy(np.ascontiguousarray(values)).cuda()

    def host(self, tensor: Any) -> NumpyArray:
        return np.asarray(tensor.cpu().numpy())

    def bfloat16(self, values: Any) -> Any:
        return values.to(self.xp.bfloat16).contiguous()

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self.xp.zeros(shape, dtype=self.xp.bfloat16, device="cuda")

    def best(self, rows: Any, count: int) -> tuple[Any, Any]:
        values, ids = rows.sort(dim=-1, descending=True, stable=True)
        return values[..., :count].contiguous(), ids[..., :count].int().contiguous()


def arrays_for(device: Literal["host", "cuda"]) -> Arrays:
    """The place for a device.

    Raises:
        DecodeError: "cuda" without torch or without a GPU.
    """
    if device == "host":
        return NumpyArrays()
    try:
        place = TorchArrays()
    except ImportError:
        raise DecodeError("device", "cuda needs torch, which is not installed; install it, or take host") from None
    if not place.xp.cuda.is_available():
        raise DecodeError("device", "torch finds no CUDA device here; take host")
    return place
