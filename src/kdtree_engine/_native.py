"""Finds and loads the kernel libraries, and turns their status codes into `KernelError`.

A library is loaded at its first use, never at import. It is refused when its ABI version is not this package's.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kdtree_engine.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Callable

Place = Literal["host", "cuda"]

ABI_VERSION = 3
FILE_NAMES: dict[str, str] = {"host": "libkdtree_host.so", "cuda": "libkdtree.so"}


class _KernelRow(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("op", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("layout", ctypes.c_char_p),
        ("geometries", ctypes.c_char_p),
        ("archs", ctypes.c_char_p),
        ("phase", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int64),
    )


@dataclass(frozen=True)
class KernelInfo:
    """One row of a library's kernel table.

    Attributes:
        name: symbol without its `kdtree_`, the word used in tests, benchmarks and records.
        op: what it computes; kernels of one op take the same arguments.
        dtype: element type of q and kv.
        layout: "dense" or "paged".
        geometries: (d_latent, d_rope) pairs it is instantiated for.
        archs: what its instructions need, as "sm_80+".
        phase: the pipeline phase that proves it.
        shared_bytes: the most dynamic shared memory a block of it asks for, in bytes.
    """

    name: str
    op: str
    dtype: str
    layout: str
    geometries: tuple[tuple[int, int], ...]
    archs: str
    phase: int
    shared_bytes: int


class Library:
    """A loaded kernel library.

    Attributes:
        path: the file.
        place: "host" or "cuda": which pointers its kernels take.
        archs: architectures with machine code in it.
        kernels: its kernel table.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._dll = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(
                "library", f"{path} cannot be loaded ({error}); rebuild it with `nox -s build`"
            ) from error
        try:
            version = self._dll.kdtree_abi_version()
        except AttributeError as error:
            raise KernelError("library", f"{path} is not a kdtree library; rebuild it with `nox -s build`") from error
        if version != ABI_VERSION:
            raise KernelError(
                "library",
                f"{path} has ABI version {version}, this package expects {ABI_VERSION}; rebuild it with `nox -s build`",
            )
        for function in ("last_error", "build_place", "build_archs"):
            getattr(self._dll, f"kdtree_{function}").restype = ctypes.c_char_p
        self._dll.kdtree_kernel_at.restype = ctypes.POINTER(_KernelRow)
        self.path = path
        self.place: str = self._dll.kdtree_build_place().decode()
        self.archs: tuple[str, ...] = tuple(self._dll.kdtree_build_archs().decode().split())
        self.kernels = tuple(
            _kernel_info(self._dll.kdtree_kernel_at(index).contents) for index in range(self._dll.kdtree_num_kernels())
        )

    def kernel(self, name: str, op: str) -> KernelInfo:
        """The row of kernel `name`; `KernelError` when this library has no such kernel of the op."""
        for info in self.kernels:
            if info.name == name and info.op == op:
                return info
        known = ", ".join(info.name for info in self.kernels if info.op == op)
        raise KernelError("kernel", f"got {name!r}, expected one of {known}; `kdtree-engine kernels` lists them")

    def call(self, function: str, *arguments: object) -> None:
        """Calls `kdtree_<function>`; a negative status becomes a `KernelError` that names the argument."""
        symbol: Callable[..., int] = getattr(self._dll, f"kdtree_{function}")
        if symbol(*arguments) != 0:
            argument, _, problem = self._dll.kdtree_last_error().decode(errors="replace").partition(": ")
            raise KernelError(argument, problem)


def _kernel_info(row: _KernelRow) -> KernelInfo:
    pairs = (pair.split("/") for pair in row.geometries.decode().split())
    return KernelInfo(
        name=row.name.decode(),
        op=row.op.decode(),
        dtype=row.dtype.decode(),
        layout=row.layout.decode(),
        geometries=tuple((int(latent), int(rope)) for latent, rope in pairs),
        archs=row.archs.decode(),
        phase=row.phase,
        shared_bytes=row.shared_bytes,
    )


def library(place: Place | Path = "host") -> Library:
    """The library of a place, or the one at a path.

    A place is looked for at `KDTREE_ENGINE_LIBRARY` (a file), in `KDTREE_ENGINE_LIBRARY_DIR` (a folder), then beside
    this package. Loading needs no GPU and no driver.

    Raises:
        KernelError: there is none, it does not load, or its ABI version is another.
    """
    if isinstance(place, Path):
        return _load(place.resolve())
    if place not in FILE_NAMES:
        raise KernelError("place", f"got {place!r}, expected one of {', '.join(FILE_NAMES)}")
    named = os.environ.get("KDTREE_ENGINE_LIBRARY")
    if named:
        loaded = _load(Path(named).resolve())
        if loaded.place == place:
            return loaded
    folders = [Path(__file__).parent]
    if folder := os.environ.get("KDTREE_ENGINE_LIBRARY_DIR"):
        folders.insert(0, Path(folder))
    for path in (folder / FILE_NAMES[place] for folder in folders):
        if path.is_file():
            return _load(path.resolve())
    looked = " and ".join(str(folder) for folder in folders)
    raise KernelError("library", f"no {FILE_NAMES[place]} in {looked}; build it with `nox -s build`")


@cache
def _load(path: Path) -> Library:
    return Library(path)
