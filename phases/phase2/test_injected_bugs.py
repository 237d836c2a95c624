"""Phase 2 on the host: verify_attn_flash_paged with a bug put in, each caught by the tool named for it.

"numbers" compares with the oracle, with NaN in what must not count.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from oracle.verify_attn_paged import verify_attn_paged
from phases import host_build, injected_bugs
from phases.injected_bugs import Bug
from phases.paged import Case, problems
from phases.places import Place

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

SOURCE = host_build.KERNELS / "verify_attn" / "verify_attn_flash_paged.cu"

BUGS = [
    Bug("no_barrier_before_scores_wide", "race", "cp_async_wait<1>();\n      __syncthreads();", "cp_async_wait<1>();"),
    Bug("no_wait_for_tiles_wide", "race", "cp_async_wait<1>();", "cp_async_wait<2>();"),
    Bug(
        "no_barrier_before_scores_narrow",
        "race",
        "cp_async_wait<0>();\n      group_barrier(group);",
        "cp_async_wait<0>();",
    ),
    Bug(
        "no_wait_for_tiles_narrow",
        "race",
        "cp_async_wait<0>();\n      group_barrier(group);",
        "group_barrier(group);",
    ),
    Bug(
        "no_barrier_after_scores",
        "race",
        "score(group, u, keys);\n      group_barrier(group);",
        "score(group, u, keys);",
    ),
    Bug("ring_not_free_at_the_end", "race", "block_barrier();  // the ring is free", ""),
    Bug("merge_classes_not_read", "race", "__syncthreads();  // the previous item's classes have been read", ""),
    Bug("rows_past_the_last_written", "asan", "if (row >= piece.live_rows) continue;", ""),
    Bug("drafts_past_the_end_read", "asan", "if (key >= piece.keys || ", "if ("),
    Bug("mask_of_another_node", "numbers", "min(row, piece.live_rows - 1)) / heads", "0) / heads"),
    Bug("one_word_of_the_mask", "numbers", "if (from % 64 > 64 - kTileKeys &&", "if (false &&"),
    Bug("mask_not_shifted", "numbers", "window << (from - first)", "window"),
    Bug("prefix_hidden_beside_drafts", "numbers", "if (first < 0) seen |=", "if (false) seen |="),
    Bug("keys_past_the_end_count", "numbers", "if (left < kTileKeys) window &=", "if (false) window &="),
    Bug("full_mask_of_small_rows", "numbers", "pitch = nodes + (full ? request.mask_prefix : 0)", "pitch = nodes"),
    Bug("not_finite_multiplied", "numbers", "finite_bf16x2(now[r])", "now[r]"),
    Bug("sum_not_rescaled", "numbers", "row_sum *= rescale;", ""),
    Bug("divisor_not_rescaled", "numbers", "divisor *= rescale;", ""),
    Bug("output_not_rescaled", "numbers", "out[m][n][2 * half] *= rescale;", ""),
    Bug("partials_of_another_size", "numbers", "make_float4(stats.x + e,", "make_float4(stats.x,"),
    Bug("base_two_for_natural", "numbers", "(reference + log2f(sum)) * kLn2", "reference + log2f(sum)"),
    Bug("first_token_of_every_page", "numbers", "(key & ((1 << params.page_shift) - 1))", "0"),
    Bug("slots_outside_read", "asan", "valid && slot < static_cast<uint32_t>(params.args.num_slots)", "valid"),
    Bug("cap_on_the_product", "numbers", "* args.sm_scale / args.logit_cap", "/ args.logit_cap"),
]

# No array is longer than what is in use, so that reading past one is noticed.
CASES = [
    Case((1,), (20,), 5, spare=0),
    Case((2,), (70,), 4, form="mask_bits", pool_drafts=True, spare=0),
    Case((5, 3), (70, 33), 4, tree="any", form="full_mask", page_size=16, spare=0),
    Case((9, 66), (40, 130), 2, form="mask_bits", strided=True, split_tokens=32, spare=0),
    Case((9,), (70,), 8, tree="any", form="full_mask", spare=0, pool_drafts=True),
    Case((17,), (300,), 4, form="parents", spread=12.0, spare=0),
    Case((1, 2), (2200, 40), 16, logit_cap=3.0, split_tokens=16, spare=0),
]


def is_right(path: Path) -> bool:
    """Whether the library's kernel agrees with the oracle."""
    place = Place("host", path)
    questions = [(case, case.inputs(), case.answer()) for case in CASES]
    outside = CASES[0].inputs()
    outside["kv_indices"][3] = 2**30  # a slot that the pool does not have
    questions.append((CASES[0], outside, verify_attn_paged(**outside)))
    for case, inputs, right in questions:
        found, _ = problems(place.verify_attn_paged("verify_attn_flash_paged", **inputs, **case.options()), right)
        if found:
            print(case, found)
            return False
    return True


def run(bug: Bug | None, variant: host_build.Variant, folder: Path) -> subprocess.CompletedProcess[str]:
    return injected_bugs.run("phases.phase2.test_injected_bugs", SOURCE, bug, variant, folder)


@pytest.mark.parametrize("variant", ["plain", "race", "asan"])
def test_without_a_bug_every_tool_is_silent(variant: host_build.Variant, tmp_path: Path) -> None:
    result = run(None, variant, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    injected_bugs.assert_caught(bug, SOURCE, run(bug, bug.variant, tmp_path))


if __name__ == "__main__":
    sys.exit(injected_bugs.judge(is_right))
