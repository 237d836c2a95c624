"""NumPy arrays and torch tensors as the libraries take them: pointers, strides, dtypes, a stream.

bfloat16 is a dtype of torch; in NumPy it is uint16, the upper half of a float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kdtree_engine._native import library as find_library
from kdtree_engine.errors import KernelError

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Mapping

    from kdtree_engine._native import Library
    from kdtree_engine.contract import Axes


def kind(value: object) -> str:
    """What a value is, for an error."""
    return f"a {type(value).__module__}.{type(value).__qualname__}"


class NumpyAdaptor:
    """NumPy arrays for the host library."""

    place = "host"
    stream = None

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def check(
        self, name: str, tensor: Any, dtypes: tuple[str, ...], *, writes: bool = False, dense: bool = True
    ) -> None:
        """Refuses what the library could not read: another kind, dtype or (where `dense`) layout."""
        if not isinstance(tensor, np.ndarray):
            raise KernelError(name, f"got {kind(tensor)}, expected a NumPy array as q is; convert it")
        if self.dtype(tensor) not in dtypes or not tensor.dtype.isnative:
            raise KernelError(name, f"got dtype {tensor.dtype}, expected {self._names(dtypes)}; convert it")
        if dense and not tensor.flags.c_contiguous:
            raise KernelError(name, f"got strides {tensor.strides}, expected a dense row-major array; copy it")
        if writes and not tensor.flags.writeable:
            raise KernelError(name, "got a read-only array, expected one to write to; copy it")

    def _names(self, dtypes: tuple[str, ...]) -> str:
        return " or ".join("uint16 (bfloat16)" if dtype == "bfloat16" else dtype for dtype in dtypes)

    def dtype(self, tensor: Any) -> str:
        """Its name; uint16 is taken for bfloat16, there are no other tensors of that dtype."""
        name = str(tensor.dtype.name)
        return "bfloat16" if name == "uint16" else name

    def strides(self, tensor: Any) -> tuple[int, ...]:
        """In elements."""
        return tuple(stride // tensor.itemsize for stride in tensor.strides)

    def itemsize(self, tensor: Any) -> int:
        """Of an element, in bytes."""
        return int(tensor.itemsize)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        # NumPy aligns small buffers to 16 bytes at best by chance: take an aligned piece of a larger one.
        numpy_dtype = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        size = int(np.prod(shape)) * numpy_dtype.itemsize
        buffer = np.empty(size + 64, np.uint8)
        start = -buffer.ctypes.data % 64
        return buffer[start : start + size].view(numpy_dtype).reshape(shape)

    def pointer(self, tensor: Any) -> int:
        return int(tensor.ctypes.data)


class TorchAdaptor:
    """torch tensors: of a CUDA device for the GPU library, on torch's current stream; of the CPU for the host's."""

    def __init__(self, name: str, tensor: Any, *, host: bool) -> None:
        import torch

        device = tensor.device
        if device.type != "cuda" and not (host and device.type == "cpu"):
            raise KernelError(
                name, f"got a torch tensor on {device}, expected one on a CUDA device; move it there, or pass NumPy"
            )
        self._torch = torch
        self._device = device
        self.place = "cuda" if device.type == "cuda" else "host"
        self.stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None

    def active(self) -> AbstractContextManager[object]:
        # Launches go to the current device, which need not be the tensor's.
        if self.place == "host":
            return nullcontext()
        return self._torch.cuda.device(self._device)  # type: ignore[no-any-return]

    def check(
        self, name: str, tensor: Any, dtypes: tuple[str, ...], *, writes: bool = False, dense: bool = True
    ) -> None:
        """Refuses what the library could not read: another kind, device, dtype or (where `dense`) layout."""
        del writes  # every tensor can be written to
        if not isinstance(tensor, self._torch.Tensor):
            raise KernelError(name, f"got {kind(tensor)}, expected a torch tensor as q is; convert it")
        if tensor.device != self._device:
            raise KernelError(name, f"got a tensor on {tensor.device}, expected {self._device} as q is; move it")
        if self.dtype(tensor) not in dtypes:
            raise KernelError(name, f"got dtype {self.dtype(tensor)}, expected {' or '.join(dtypes)}; convert it")
        if dense and not tensor.is_contiguous():
            raise KernelError(
                name, f"got strides {tensor.stride()}, expected a dense row-major tensor; make it contiguous"
            )

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def strides(self, tensor: Any) -> tuple[int, ...]:
        """In elements."""
        return tuple(tensor.stride())

    def itemsize(self, tensor: Any) -> int:
        """Of an element, in bytes."""
        return int(tensor.element_size())

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self._device)

    def pointer(self, tensor: Any) -> int:
        return int(tensor.data_ptr())


def adaptor_for(name: str, tensor: object, *, host: bool = False) -> NumpyAdaptor | TorchAdaptor:
    """The adaptor for argument `name`; torch tensors of the CPU only where `host`."""
    if isinstance(tensor, np.ndarray):
        return NumpyAdaptor()
    if type(tensor).__module__.partition(".")[0] == "torch":
        return TorchAdaptor(name, tensor, host=host)
    raise KernelError(name, f"got {kind(tensor)}, expected a NumPy array or a torch CUDA tensor; convert it")


Outputs = TypeVar("Outputs", bound=tuple[Any, ...])
INDEX_DTYPES = ("int32", "int64")  # in the order of kdtree_index_type
FLOAT_DTYPES = ("bfloat16", "float32")  # in the order of kdtree_float_type


def put(
    args: ctypes.Structure,
    adaptor: NumpyAdaptor | TorchAdaptor,
    axes: Axes,
    name: str,
    tensor: Any,
    dtypes: tuple[str, ...],
    shape: str,
    *,
    required: bool = False,
    writes: bool = False,
) -> None:
    """Puts the address of a dense tensor into field `name` of an argument struct; None, unless `required`, is null.

    Raises:
        KernelError: another kind, device, dtype or shape than `dtypes` and the axis names in `shape`.
    """
    if tensor is None and not required:
        return
    adaptor.check(name, tensor, dtypes, writes=writes)
    axes.check(name, tuple(tensor.shape), shape)
    setattr(args, name, adaptor.pointer(tensor))


def put_outputs(
    args: ctypes.Structure,
    adaptor: NumpyAdaptor | TorchAdaptor,
    axes: Axes,
    kind: type[Outputs],
    given: Outputs | None,
    specs: Mapping[str, tuple[tuple[str, ...], str]],
    required: tuple[str, ...],
) -> Outputs:
    """Puts a named tuple of outputs, with the dtypes and axis names in `specs`, into an argument struct.

    None allocates all of them, with the first of their dtypes; of given ones those not `required` may be None.
    """
    if given is None:
        shapes = ((dtypes[0], tuple(axes[axis] for axis in names.split())) for dtypes, names in specs.values())
        given = kind(*(adaptor.empty(shape, dtype) for dtype, shape in shapes))
    for name, (dtypes, names) in specs.items():
        put(args, adaptor, axes, name, getattr(given, name), dtypes, names, required=name in required, writes=True)
    return given


def number(name: str, value: object, hint: str) -> float:
    """`value` as a float; `KernelError` when it is none."""
    if not isinstance(value, int | float | np.floating):
        raise KernelError(name, f"got {kind(value)}, expected a number; {hint}")
    return float(value)


def integer(name: str, value: object, hint: str) -> int:
    """`value` as an int; `KernelError` when it is none."""
    if not isinstance(value, int | np.integer):
        raise KernelError(name, f"got {kind(value)}, expected an int; {hint}")
    return int(value)


def library_for(adaptor: NumpyAdaptor | TorchAdaptor, tensor: object, library: Library | None) -> Library:
    """`library`, or the one for the adaptor's place; `KernelError` when it runs elsewhere."""
    if library is None:
        library = find_library("host" if adaptor.place == "host" else "cuda")
    if library.place != adaptor.place:
        raise KernelError(
            "library", f"{library.path.name} runs on {library.place}, expected {adaptor.place} for {kind(tensor)}"
        )
    return library
