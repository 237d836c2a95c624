"""The kernels of kernels/conformance/pipeline.cu: inputs, a float64 reference, a way to run them.

As a script it runs one library's kernels and writes their outputs, for builds that need a process
of their own:

    python -m phases.phase0.pipeline LIBRARY OUTPUT.npz
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_ROWS, NUM_KEYS, DIM = 13, 75, 64  # neither a multiple of its tile
NUM_BLOCKS, NUM_HEADS, PAGE_SIZE = 2, 16, 16
NUM_TILES = -(-NUM_KEYS // PAGE_SIZE)


class PipelineError(Exception):
    """A launch failed; the library's own line."""


class Inputs(NamedTuple):
    """Of both kernels; bf16 as its 16-bit pattern."""

    q: NDArray[np.float32]  # [NUM_ROWS, DIM]
    k: NDArray[np.float32]  # [NUM_KEYS, DIM]
    paged_q: NDArray[np.uint16]  # [NUM_BLOCKS, NUM_HEADS, DIM]
    pool: NDArray[np.uint16]  # [pages, PAGE_SIZE, DIM], NaN where no token lies
    page_table: NDArray[np.int32]  # [NUM_BLOCKS, NUM_TILES]


class Outputs(NamedTuple):
    """Of both kernels."""

    attend_float: NDArray[np.float32]  # [NUM_ROWS, DIM]
    attend_paged: NDArray[np.float32]  # [NUM_BLOCKS, NUM_HEADS, DIM]


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _float(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


@functools.cache
def inputs() -> Inputs:
    """Seeded; pages are scattered, and the pool's last page is in use."""
    rng = np.random.default_rng(2)
    num_pages = NUM_BLOCKS * NUM_TILES + 3
    page_table = rng.permutation(num_pages)[: NUM_BLOCKS * NUM_TILES].reshape(NUM_BLOCKS, NUM_TILES)
    if num_pages - 1 not in page_table:
        page_table[0, 1] = num_pages - 1
    pool = np.full((num_pages, PAGE_SIZE, DIM), 0xFFFF, np.uint16)
    tokens = _bf16(rng.standard_normal((NUM_BLOCKS, NUM_KEYS, DIM), np.float32))
    for block in range(NUM_BLOCKS):
        for key in range(NUM_KEYS):
            pool[page_table[block, key // PAGE_SIZE], key % PAGE_SIZE] = tokens[block, key]
    return Inputs(
        q=rng.standard_normal((NUM_ROWS, DIM), np.float32),
        k=rng.standard_normal((NUM_KEYS, DIM), np.float32),
        paged_q=_bf16(rng.standard_normal((NUM_BLOCKS, NUM_HEADS, DIM), np.float32)),
        pool=pool,
        page_table=page_table.astype(np.int32),
    )


def _attend(q: NDArray[np.float64], k: NDArray[np.float64]) -> NDArray[np.float64]:
    scores = q @ k.T
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True) @ k
    return result


def expected() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both outputs in float64."""
    x = inputs()
    paged = [
        _attend(_float(x.paged_q[block]), _float(x.pool[pages]).reshape(-1, DIM)[:NUM_KEYS])
        for block, pages in enumerate(x.page_table)
    ]
    return _attend(x.q.astype(np.float64), x.k.astype(np.float64)), np.stack(paged)


def run(library: Path) -> Outputs:
    """Both kernels on `inputs`.

    Raises:
        PipelineError: a launch failed.
    """
    loaded = ctypes.CDLL(str(library))
    loaded.kdtree_pipeline_error.restype = ctypes.c_char_p
    x = inputs()
    out = Outputs(
        np.full((NUM_ROWS, DIM), np.nan, np.float32),
        np.full((NUM_BLOCKS, NUM_HEADS, DIM), np.nan, np.float32),
    )

    def call(name: str, arrays: list[NDArray[Any]], sizes: tuple[int, int]) -> None:
        addresses = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
        if loaded[name](*addresses, *sizes, None) != 0:
            raise PipelineError(loaded.kdtree_pipeline_error().decode())

    call("kdtree_attend_float", [x.q, x.k, out.attend_float], (NUM_ROWS, NUM_KEYS))
    paged: list[NDArray[Any]] = [x.paged_q, x.pool, x.page_table, out.attend_paged]
    call("kdtree_attend_paged", paged, (NUM_BLOCKS, NUM_KEYS))
    return out


if __name__ == "__main__":
    try:
        np.savez(sys.argv[2], *run(Path(sys.argv[1])))
    except PipelineError as error:
        sys.exit(str(error))
