"""Where a gate runs its kernels: the host build on NumPy arrays, or a GPU through torch.

Both take and return NumPy arrays, so that one test serves both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kdtree_engine import KernelInfo, library, verify_attn

if TYPE_CHECKING:
    import numpy.typing as npt

    from kdtree_engine._native import Library

    Array = npt.NDArray[Any]


class Place:
    """A library and how to hand tensors to it.

    Attributes:
        kind: "host" or "cuda".
        name: the word of evidence: "host", or the GPU's architecture as "sm_90".
        device: for people: the GPU's name, or "host".
        driver: version of the GPU's driver; None on the host.
        library: the loaded kernels.
    """

    def __init__(self, kind: Literal["host", "cuda"]) -> None:
        self.kind = kind
        self.library: Library = library(kind)
        self.name, self.device = "host", "host"
        self.driver: str | None = None
        if kind == "cuda":
            import torch

            major, minor = torch.cuda.get_device_capability()
            self.name, self.device = f"sm_{major}{minor}", torch.cuda.get_device_name()
            version = Path("/proc/driver/nvidia/version")
            found = re.search(r"\b\d+\.\d+(\.\d+)?\b", version.read_text()) if version.exists() else None
            self.driver = found[0] if found else None

    def kernels(self, phase: int) -> list[KernelInfo]:
        """The kernels that a phase proves."""
        return [info for info in self.library.kernels if info.phase == phase]

    def tensor(self, array: Array) -> Any:
        """`array` where the kernels can read it."""
        if self.kind == "host":
            return np.ascontiguousarray(array)
        import torch

        return torch.from_numpy(np.ascontiguousarray(array)).cuda()

    def array(self, tensor: Any) -> Array:
        """A tensor of this place as a NumPy array, once the device is done with it."""
        return np.asarray(tensor if self.kind == "host" else tensor.cpu().numpy())

    def verify_attn(
        self,
        kernel: str,
        q: Array,
        kv: Array,
        *,
        mask: Array | None = None,
        kv_len: Array | None = None,
        **arguments: Any,
    ) -> tuple[Array, Array]:
        """`kdtree_engine.verify_attn` from NumPy to NumPy."""
        tensors: dict[str, Any] = {
            name: None if given is None else self.tensor(given) for name, given in (("mask", mask), ("kv_len", kv_len))
        }
        out, lse = verify_attn(
            self.tensor(q), self.tensor(kv), kernel=kernel, library=self.library, **tensors, **arguments
        )
        return self.array(out), self.array(lse)
