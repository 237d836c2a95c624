"""Where a gate runs its kernels: the host build on NumPy arrays, or a GPU through torch.

Both take and return NumPy arrays, so that one test serves both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kdtree_engine import KernelInfo, library, merge_partials, verify_attn, verify_attn_paged
from phases.paged import parts

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

    def __init__(self, kind: Literal["host", "cuda"], path: Path | None = None) -> None:
        """`path` is a library of that kind to take instead of the usual one."""
        self.kind = kind
        self.library: Library = library(kind if path is None else path)
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

    def strided(self, array: Array) -> Any:
        """`array` where the kernels can read it, its strides kept; uint16 is taken for bfloat16 bits."""
        if self.kind == "host":
            return array
        import torch

        strides = [stride // array.itemsize for stride in array.strides]
        reach = 1 + sum((size - 1) * stride for size, stride in zip(array.shape, strides, strict=True))
        flat = np.lib.stride_tricks.as_strided(array, (reach if array.size else 0,), (array.itemsize,))
        signed = flat.view({"uint16": np.int16, "uint64": np.int64}.get(flat.dtype.name, flat.dtype))
        tensor = torch.from_numpy(signed.copy()).cuda()
        if array.dtype == np.uint16:
            tensor = tensor.view(torch.bfloat16)
        return torch.as_strided(tensor, array.shape, strides)

    def array(self, tensor: Any) -> Array:
        """A tensor of this place as a NumPy array, once the device is done with it; bfloat16 as uint16 bits."""
        if self.kind == "host":
            return np.asarray(tensor)
        import torch

        if tensor.dtype == torch.bfloat16:
            return np.asarray(tensor.view(torch.int16).cpu().numpy().view(np.uint16))
        return np.asarray(tensor.cpu().numpy())

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

    def verify_attn_paged(self, kernel: str, q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
        """`kdtree_engine.verify_attn_paged` from NumPy to NumPy."""
        tensors = {name: self.given(value) for name, value in arguments.items()}
        out, lse = verify_attn_paged(
            self.strided(q), self.strided(kv_pool), kernel=kernel, library=self.library, **tensors
        )
        return self.array(out), self.array(lse)

    def merge_partials(self, outs: Array, lses: Array, **arguments: Any) -> tuple[Array, Array]:
        """`kdtree_engine.merge_partials` from NumPy to NumPy."""
        out, lse = merge_partials(self.strided(outs), self.strided(lses), library=self.library, **arguments)
        return self.array(out), self.array(lse)

    def in_parts(self, count: int, q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
        """`verify_attn_paged` by `count` ranks that share the keys, and `merge_partials`: out bfloat16, and lse."""
        shared = {name: value for name, value in arguments.items() if name not in ("out_dtype", "kernel")}
        ranks = parts(count, q=q, kv_pool=kv_pool, **shared)
        results = [self.verify_attn_paged("verify_attn_flash_paged", **rank) for rank in ranks]
        outs, lses = (np.stack(tensors) for tensors in zip(*results, strict=True))
        return self.merge_partials(outs, lses, out_dtype="bfloat16")

    def given(self, value: Any) -> Any:
        """An argument: arrays where the kernels can read them, all else as it is."""
        return self.strided(value) if isinstance(value, np.ndarray) else value
