"""Phase 1 on the host: verify_attn_flash with a bug put in, each caught by the tool named for it.

"numbers" compares with the oracle, with NaN in what must not count.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine import library, verify_attn
from kdtree_engine.compare import compare
from kdtree_engine.ops.verify_attn import LSE_ABS, OUT_ROW_REL_L2
from oracle import verify_attn as oracle
from phases import host_build, injected_bugs
from phases.injected_bugs import Bug

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    import numpy.typing as npt

    Array = npt.NDArray[Any]

SOURCE = host_build.KERNELS / "verify_attn" / "verify_attn_flash.cu"
WAIT_FOR_VALUES = """      cp_async_wait<0>();
      __syncthreads();
      if (chunk + 1 < kValueChunks) {"""


BUGS = [
    # The chunks of a tile are odd in number, so a fixed half is right in every other tile: a bug this kernel once had.
    Bug(
        "ring_half_fixed",
        "race",
        "load_qk(shared.ring[stage ^ 1], tile_key + kKeyTile",
        "load_qk(shared.ring[0], tile_key + kKeyTile",
    ),
    Bug("ring_half_kept", "numbers", "kRows * kChunkPitch;\n      stage ^= 1;", "kRows * kChunkPitch;"),
    Bug("no_barrier_at_a_chunk", "race", "__syncthreads();  // the chunk is there for all", "// the chunk"),
    Bug("no_barrier_at_values", "race", WAIT_FOR_VALUES, WAIT_FOR_VALUES.replace("__syncthreads();", ";")),
    Bug("no_wait_for_values", "race", WAIT_FOR_VALUES, WAIT_FOR_VALUES.replace("cp_async_wait<0>();", ";")),
    Bug("no_vote_barrier", "race", "__syncthreads_or(hidden_not_finite)", "hidden_not_finite"),
    Bug("keys_past_the_end_read", "asan", "tile_key + key + load_row < num_keys", "true"),
    Bug("zero_weights_multiplied", "numbers", "if (skip_zero_weights) {", "if (false) {"),
    Bug("sum_not_rescaled", "numbers", "row_sum *= rescale;", ""),
    Bug("one_key_too_many", "numbers", "softmax_live && key < num_keys;", "softmax_live && key <= num_keys;"),
    Bug(
        "mask_of_another_node", "numbers", "(first_row + softmax_row) / args.num_heads", "softmax_row / args.num_heads"
    ),
    Bug("group_forgotten", "numbers", "for (int g = 0; g < kGroups / 2; ++g)", "for (int g = 0; g < 1; ++g)"),
    Bug("natural_for_base_two", "numbers", "{args.out, args.lse, kLn2}", "{args.out, args.lse, 1.0f}"),
]


def inputs() -> dict[str, Any]:
    """Two requests, 72 rows of tile 64 and the tail, 150 keys of which the second request uses 70; some keys unseen."""
    rng = np.random.default_rng(20260601)
    q = rng.standard_normal((2, 9, 8, 576), np.float32)
    kv = rng.standard_normal((2, 150, 576), np.float32)
    mask = (rng.random((2, 9, 150)) < 0.7).astype(np.uint8)
    mask[:, :, 20:25] = 0
    mask[:, :, 0] = 1
    return {"q": q, "kv": kv, "mask": mask, "kv_len": np.array([150, 70], np.int32), "sm_scale": 0.05}


def full_inputs() -> dict[str, Any]:
    """Every key in use, to the very end of the buffer."""
    return inputs() | {"kv_len": None}


def small_inputs() -> dict[str, Any]:
    """The same request with one head and two nodes: the tile of 16 rows and its eight groups."""
    given = inputs()
    given["q"], given["mask"] = given["q"][:, :2, :1].copy(), given["mask"][:, :2].copy()
    return given


def run(path: Path, given: dict[str, Any], split_tokens: int = 0) -> tuple[Array, Array]:
    return verify_attn(**given, library=library(path), split_tokens=split_tokens)


def is_right(path: Path) -> bool:
    """Whether the library's kernel agrees with the oracle, with NaN in every key that no row sees."""
    cases = ((inputs(), 0), (inputs(), 64), (full_inputs(), 0), (small_inputs(), 0), (small_inputs(), 448))
    for given, split_tokens in cases:
        expected_out, expected_lse = oracle.verify_attn(**given)
        given["kv"][given["mask"].max(axis=1) == 0] = math.nan
        if given["kv_len"] is not None:
            given["kv"][1, 70:] = math.nan
        out, lse = run(path, given, split_tokens)
        if not compare(out, expected_out, name="out").within(row_rel_l2=OUT_ROW_REL_L2):
            return False
        if not compare(lse, expected_lse, name="lse").within(max_abs=LSE_ABS):
            return False
    return True


def run_alone(bug: Bug | None, variant: host_build.Variant, folder: Path) -> subprocess.CompletedProcess[str]:
    return injected_bugs.run("phases.phase1.test_injected_bugs", SOURCE, bug, variant, folder)


@pytest.mark.parametrize("variant", ["plain", "race", "asan"])
def test_without_a_bug_every_tool_is_silent(variant: host_build.Variant, tmp_path: Path) -> None:
    result = run_alone(None, variant, tmp_path)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    injected_bugs.assert_caught(bug, SOURCE, run_alone(bug, bug.variant, tmp_path))


if __name__ == "__main__":
    sys.exit(injected_bugs.judge(is_right))
