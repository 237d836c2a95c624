"""Checks of the kernels' vocabulary, for either build.

Each check runs one kernel of kernels/conformance/conformance.cu and compares it with NumPy. Fragment
layouts are written here from the PTX ISA ("Matrix Fragments for mma.m16n8k16", "ldmatrix"), not
from the emulation. The host build takes them with HostMemory, the CUDA build with CudaMemory:

    for name, check in CHECKS.items():
        check(Runner(library_path, CudaMemory()))
"""

from __future__ import annotations

import ctypes
import importlib
import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    Words = NDArray[np.uint32]

LANES = np.arange(32)
UNWRITTEN = 0xA5A5A5A5  # what outputs hold before a kernel runs


class Memory(Protocol):
    """Where a library's pointers lead."""

    def upload(self, array: Words) -> Any:
        """A copy of the array that a kernel may read and write."""

    def address(self, buffer: Any) -> int:
        """Its address."""

    def download(self, buffer: Any) -> Words:
        """Its content, once the kernels before have finished."""


class HostMemory:
    """NumPy arrays, for the host build."""

    def upload(self, array: Words) -> Words:
        return array.copy()

    def address(self, buffer: Words) -> int:
        return buffer.ctypes.data

    def download(self, buffer: Words) -> Words:
        return buffer


class CudaMemory:
    """Torch tensors on the current GPU, for the CUDA build; kernels run on the default stream."""

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")  # only a GPU run needs it

    def upload(self, array: Words) -> Any:
        return self._torch.from_numpy(array.view(np.int32).copy()).cuda()

    def address(self, buffer: Any) -> int:
        return int(buffer.data_ptr())

    def download(self, buffer: Any) -> Words:
        self._torch.cuda.synchronize()
        words: Words = buffer.cpu().numpy().view(np.uint32)
        return words


class ConformanceError(Exception):
    """A launch failed; the library's own line."""


class Runner:
    """One conformance library."""

    def __init__(self, library: Path, memory: Memory, entry: str = "kdtree_conformance") -> None:
        loaded = ctypes.CDLL(str(library))
        self._memory = memory
        self._entry = loaded[entry]
        self._entry.argtypes = [
            ctypes.c_char_p,
            *[ctypes.c_void_p] * 3,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        self._error = loaded.kdtree_conformance_error
        self._error.restype = ctypes.c_char_p

    def run(
        self,
        name: str,
        a: NDArray[Any],
        b: NDArray[Any],
        out_shape: tuple[int, ...],
        n: int = 0,
    ) -> Words:
        """Output words of one kernel; a and b are passed as 32-bit words.

        Raises:
            ConformanceError: the launch failed.
        """
        inputs = [self._memory.upload(np.ascontiguousarray(x).view(np.uint32)) for x in (a, b)]
        out = self._memory.upload(np.full(out_shape, UNWRITTEN, np.uint32))
        addresses = [self._memory.address(buffer) for buffer in (*inputs, out)]
        if self._entry(name.encode(), *addresses, n, None) != 0:
            raise ConformanceError(self._error().decode())
        return self._memory.download(out)


def bf16_bits(values: NDArray[Any]) -> NDArray[np.uint32]:
    """Round to nearest even, by way of exact arithmetic on integers; NaN becomes 0x7fff."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    kept, dropped = bits >> 16, bits & 0xFFFF
    up = (dropped > 0x8000) | ((dropped == 0x8000) & (kept & 1 == 1))
    rounded = (kept + up).astype(np.uint32)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded)


def pack(lo: NDArray[Any], hi: NDArray[Any]) -> NDArray[np.uint32]:
    """Two 16-bit patterns as one register, the first in the low half."""
    return lo.astype(np.uint32) | hi.astype(np.uint32) << np.uint32(16)


def mma_coordinates(operand: str, i: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Row and column of element i of each lane's fragment of A, B or C (PTX ISA, m16n8k16)."""
    group, member = LANES >> 2, LANES % 4
    if operand == "a":
        row = group if i < 2 or 4 <= i < 6 else group + 8
        return row, member * 2 + (i & 1) + (8 if i >= 4 else 0)
    if operand == "b":
        return member * 2 + (i & 1) + (8 if i >= 2 else 0), group
    return group if i < 2 else group + 8, member * 2 + (i & 1)


def check_mma(runner: Runner) -> None:
    """C + A B of small integers, which bf16 and float32 hold exactly."""
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(-8, 8, shape) for shape in [(16, 16), (16, 8), (16, 8)])

    def fragment(matrix: NDArray[Any], operand: str, register: int) -> NDArray[np.uint32]:
        halves = [bf16_bits(matrix[mma_coordinates(operand, 2 * register + i)].astype(np.float32)) for i in (0, 1)]
        return pack(*halves)

    registers = [fragment(a, "a", i) for i in range(4)] + [fragment(b, "b", i) for i in range(2)]
    c_fragments = np.stack([c[mma_coordinates("c", i)] for i in range(4)], axis=1)
    out = runner.run("mma", np.stack(registers, axis=1), c_fragments.astype(np.float32), (32, 4))
    expected = c + a @ b
    for i in range(4):
        np.testing.assert_array_equal(out.view(np.float32)[:, i], expected[mma_coordinates("c", i)], err_msg=f"c{i}")


def _check_ldmatrix(runner: Runner, name: str, matrices: int, transposed: bool) -> None:
    rng = np.random.default_rng(2)
    elements = rng.permutation(256).astype(np.uint16).reshape(32, 8)
    rows = rng.permutation(32).astype(np.uint32)
    out = runner.run(name, elements, rows, (32, matrices))
    for m in range(matrices):
        matrix = elements[rows[8 * m : 8 * m + 8]]
        if transposed:
            matrix = matrix.T
        row, column = LANES // 4, 2 * (LANES % 4)
        expected = pack(matrix[row, column], matrix[row, column + 1])
        np.testing.assert_array_equal(out[:, m], expected, err_msg=f"matrix {m}")


def check_ldmatrix_x4(runner: Runner) -> None:
    """Rows in any order; lane l receives a pair of row l / 4."""
    _check_ldmatrix(runner, "ldmatrix_x4", 4, transposed=False)


def check_ldmatrix_x4_trans(runner: Runner) -> None:
    """The same of the transpose."""
    _check_ldmatrix(runner, "ldmatrix_x4_trans", 4, transposed=True)


def check_ldmatrix_x2(runner: Runner) -> None:
    """Two matrices; the rows of lanes 16 to 31 do not count."""
    _check_ldmatrix(runner, "ldmatrix_x2", 2, transposed=False)


def check_shuffles(runner: Runner) -> None:
    """All four forms and widths, with a different operand in every lane."""
    rng = np.random.default_rng(3)
    values = rng.integers(0, 2**32, 32, np.uint32)
    operands = rng.integers(0, 32, 32, np.uint32)
    for width in (2, 4, 8, 16, 32):
        first = LANES // width * width
        last = first + width - 1
        sources = {
            "idx": first + operands % width,
            "xor": np.where((LANES ^ operands) <= last, LANES ^ operands, LANES),
            "up": np.where(LANES - operands.astype(int) >= first, LANES - operands.astype(int), LANES),
            "down": np.where(LANES + operands <= last, LANES + operands, LANES),
        }
        out = runner.run("shuffles", values, operands, (4, 32), width)
        for row, (form, source) in zip(out, sources.items(), strict=True):
            np.testing.assert_array_equal(row, values[source.astype(int)], err_msg=f"{form}, width {width}")


def check_votes(runner: Runner) -> None:
    """Ballot, any and all; and the two halves of a warp that vote apart."""
    rng = np.random.default_rng(4)
    cases = [np.zeros(32), np.ones(32), LANES == 7, LANES != 30, rng.integers(0, 2, 32)]
    for case in cases:
        predicate = case.astype(np.uint32)
        ballot = sum(int(bit) << lane for lane, bit in enumerate(predicate))
        out = runner.run("votes", predicate, predicate, (4, 32))
        np.testing.assert_array_equal(out[0], ballot)
        np.testing.assert_array_equal(out[1], int(predicate.any()))
        np.testing.assert_array_equal(out[2], int(predicate.all()))
        np.testing.assert_array_equal(out[3, :16], ballot & 0x0000FFFF)
        np.testing.assert_array_equal(out[3, 16:], ballot & 0xFFFF0000)


def check_reductions(runner: Runner) -> None:
    """Sums in the butterfly's order, bit for bit; maxima; the result in every lane."""
    rng = np.random.default_rng(5)
    values = (rng.standard_normal(32) * 10.0 ** rng.integers(-3, 4, 32)).astype(np.float32)
    out = runner.run("reductions", values, values, (10, 32)).view(np.float32)
    for i, width in enumerate((2, 4, 8, 16, 32)):
        sums = values
        for step in range(int(math.log2(width)) - 1, -1, -1):
            sums = sums + sums[LANES ^ (1 << step)]
        np.testing.assert_array_equal(out[i], sums, err_msg=f"sum of {width}")
        maxima = values.reshape(-1, width).max(axis=1).repeat(width)
        np.testing.assert_array_equal(out[5 + i], maxima, err_msg=f"maximum of {width}")


def check_copies(runner: Runner) -> None:
    """cp.async of 16 and 4 bytes; zeros where a copy is not valid, though its source is NaN."""
    rng = np.random.default_rng(6)
    source = rng.integers(0, 2**32, (32, 4), np.uint32)
    valid = rng.integers(0, 2, 32, np.uint32)
    source[valid == 0, 1] = 0xFFFFFFFF
    out = runner.run("copies", source, valid, (32, 9))[::-1]
    np.testing.assert_array_equal(out[:, :4], source)
    np.testing.assert_array_equal(out[:, 4:8], source * valid[:, None])
    np.testing.assert_array_equal(out[:, 8], source[:, 0])


def check_copy_groups(runner: Runner) -> None:
    """cp_async_wait<N> waits for all groups but the last N."""
    source = np.random.default_rng(7).integers(0, 2**32, (4, 32), np.uint32)
    np.testing.assert_array_equal(runner.run("copy_groups", source, source, (4, 32)), source)


def check_block_barriers(runner: Runner) -> None:
    """__syncthreads orders shared memory; __syncthreads_or tells all what one thread says."""
    values = np.random.default_rng(8).integers(0, 2**32, 128, np.uint32)
    for voters in ([], [0], [127], [31, 64]):
        votes = np.isin(np.arange(128), voters).astype(np.uint32)
        out = runner.run("block_barriers", values, votes, (2, 128))
        np.testing.assert_array_equal(out[0], values[::-1])
        np.testing.assert_array_equal(out[1], int(bool(voters)))


def check_group_barriers(runner: Runner) -> None:
    """Two groups of two warps go their own ways; votes of one group do not reach the other."""
    rounds = 5
    rng = np.random.default_rng(9)
    values = rng.integers(0, 2**32, 128, np.uint32)
    votes = np.full(128, rounds, np.uint32)  # no round
    votes[[3, 40]] = 1, 3
    votes[100] = 2
    out = runner.run("group_barriers", values, votes, (128, rounds + 1), rounds)
    for group in range(2):
        members = slice(64 * group, 64 * group + 64)
        np.testing.assert_array_equal(out[members, 0], np.roll(values[members], -rounds))
        expected = [int((votes[members] == i).any()) for i in range(rounds)]
        np.testing.assert_array_equal(out[members, 1:], np.tile(expected, (64, 1)))


def check_bf16(runner: Runner) -> None:
    """Rounding to nearest even: ties, denormals, overflow to infinity, infinities, NaN."""
    rng = np.random.default_rng(10)
    patterns = np.concatenate(
        [
            rng.integers(0, 2**32, 4000, np.uint32),
            # Ties with an even and an odd neighbour, and the patterns next to them.
            np.add.outer(np.arange(0x3F80, 0x3FC0) << 16, [0x7FFF, 0x8000, 0x8001]).ravel(),
            np.array(
                [0, 0x80000000, 1, 0x8000, 0x18000, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F800000, 0xFF800000],
                np.uint32,
            ),
            np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF], np.uint32),
        ]
    ).astype(np.uint32)
    values = patterns.view(np.float32)
    out = runner.run("bf16", values, values, (3, len(values)), len(values))
    bits = bf16_bits(values)
    np.testing.assert_array_equal(out[0], bits)
    np.testing.assert_array_equal(out[1], bits << np.uint32(16))
    np.testing.assert_array_equal(out[2], pack(bits, np.roll(bits, -1)))


CHECKS: dict[str, Callable[[Runner], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}
