"""Shape contracts: a tensor's axes by name, checked once for every op.

    axes = Axes(d_qk=576)
    axes.check("q", q.shape, "batch q_len num_heads d_qk")
    axes.check("kv", kv.shape, "batch kv_len d_qk")      # batch must be q's

The same name must have the same size in every tensor; the error names the tensor, the axis and who set it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdtree_engine.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Axes:
    """Sizes of named axes, learned from the tensors checked so far."""

    def __init__(self, **sizes: int) -> None:
        self._sizes = dict(sizes)
        self._origins = dict.fromkeys(sizes, "the op")

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def check(self, tensor: str, shape: Sequence[int], axes: str) -> None:
        """Checks `shape` of `tensor` against the axis names; `KernelError` where they do not agree."""
        names = axes.split()
        wanted = "[" + ", ".join(names) + "]"
        if len(shape) != len(names):
            raise KernelError(tensor, f"got shape {list(shape)}, expected {wanted}; reshape it")
        for name, size in zip(names, shape, strict=True):
            known = self._sizes.setdefault(name, size)
            origin = self._origins.setdefault(name, tensor)
            if known != size:
                raise KernelError(
                    tensor,
                    f"got shape {list(shape)}, expected {wanted} with {name} = {known} (set by {origin}); reshape it",
                )
