"""The ops of a round on the host with a bug put in, each caught by the tool named for it; "numbers" is the oracle."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from phases import host_build, injected_bugs
from phases.injected_bugs import Bug
from phases.places import Place
from phases.rounds import CASES, differences

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

BUGS = {
    "tree_build": [
        Bug(
            "candidates_not_seen_by_the_warp",
            "race",
            "__syncwarp();\n  for (int node = shared",
            "for (int node = shared",
        ),
        Bug("tuples_not_seen_by_the_warp", "race", "node], lane);\n    __syncwarp();", "node], lane);"),
        Bug("rows_not_seen_by_the_warp", "race", "    __syncwarp();\n    const int flags", "    const int flags"),
        Bug("last_row_not_seen_by_the_warp", "race", "= -INFINITY;\n    __syncwarp();", "= -INFINITY;"),
        Bug("flags_read_early", "race", "num_tuples = 1;\n  __syncthreads();", "num_tuples = 1;"),
        Bug("tree_written_before_it_is_made", "race", "* 8);\n  __syncthreads();", "* 8);"),
        Bug("links_read_early", "race", "(node);\n  }\n  __syncthreads();", "(node);\n  }"),
        Bug("ties_by_lane", "numbers", "half < 2 * kTupleWords;", "half < 0;"),
        Bug("ties_in_a_lane", "numbers", "tied = other == key || (tied && other < key);", "tied = false;"),
        Bug("ties_in_a_lane_by_node", "numbers", "(key == other && tuple_less", "(false && tuple_less"),
        Bug("ties_by_the_upper_half", "numbers", "(lanes & (lanes - 1)) | ties", "ties"),
        Bug("lower_half_not_compared", "numbers", "static_cast<uint32_t>(key) == top_lower", "true"),
        Bug("float32_scores", "numbers", "const double score = score_of(key);", "const float score = score_of(key);"),
        Bug("sibling_from_the_next_alone", "numbers", "score - own + next", "score - (own - next)"),
        Bug("holes_are_grown", "numbers", "top > kNone", "top > 0"),
        Bug(
            "rows_without_an_end",
            "numbers",
            "c < width ? double{log_probs[c]} : -INFINITY",
            "double{log_probs[min(c, width - 1)]}",
        ),
        Bug("depths_without_an_end", "numbers", "if (lane == 0) shared.log_probs[depths][0] = -INFINITY;", ""),
        Bug("far_candidates_forgotten", "numbers", "if (mine && node >= 64)", "if (false)"),
        Bug("infinity_is_a_number", "numbers", "!(value < INFINITY)", "value != value"),
        Bug("late_rising_not_seen", "numbers", "c > 0 && value >", "c == 1 && value >"),
        Bug("upper_half_repeats", "numbers", "lane + 32 < width && high == other", "false"),
        Bug("rows_after_a_bad_one", "numbers", "      depths = depth;\n", ""),
        Bug("budget_counts_the_root", "numbers", "fits ? budget + 1 : 1", "fits ? max(budget, 1) : 1"),
        Bug("budget_of_another_request", "numbers", "args.budgets[request]", "args.budgets[0]"),
        Bug("later_words_forgotten", "numbers", "next / 64 != seen / 64", "false"),
        Bug("mask_not_cleared", "numbers", "if (args.visibility != nullptr) fill_zero", "if (false) fill_zero"),
        Bug("budget_past_the_capacity", "numbers", "budget < capacity && depths", "depths"),
        Bug("depths_past_the_capacity", "asan", "depths <= args.max_depth && ", ""),
        Bug(
            "width_past_the_capacity",
            "asan",
            "width >= 1 &&\n                    width <= args.max_width;",
            "width >= 1;",
        ),
    ],
    "tree_accept": [
        Bug("keys_read_early", "race", "= key;\n  __syncthreads();\n  uint64_t best", "= key;\n  uint64_t best"),
        Bug(
            "keys_overwritten",
            "race",
            "__syncthreads();  // what was there has been read\n  if (threadIdx.x % 32 == 0) shared.keys",
            "if (threadIdx.x % 32 == 0) shared.keys",
        ),
        Bug(
            "length_read_early",
            "race",
            "shared.path_len = length;\n  }\n  __syncthreads();",
            "shared.path_len = length;\n  }",
        ),
        Bug(
            "higher_token_of_equals",
            "numbers",
            "| ~static_cast<uint32_t>(token);",
            "| static_cast<uint32_t>(token) ^ 0x7fffffff;",
        ),
        Bug("negative_logits_reversed", "numbers", "bits >> 31 ? ~bits : bits | 0x80000000u", "bits | 0x80000000u"),
        Bug("zeros_differ", "numbers", "__float_as_uint(value + 0.0f)", "__float_as_uint(value)"),
        Bug("token_before_its_share", "numbers", "running > wanted", "running >= wanted"),
        Bug("weights_below_the_range", "numbers", "return w < 0x1p-126f ? 0.0 : double{w};", "return double{w};"),
        Bug("temperature_multiplied", "numbers", "/ args.temperature", "* args.temperature"),
        Bug("uniform_of_one", "numbers", "uniform < 1.0f", "uniform <= 1.0f"),
        Bug(
            "another_child_that_matches",
            "numbers",
            "__ffs(static_cast<int>(lanes)) - 1",
            "__popc(lanes) / 2 + __ffs(static_cast<int>(lanes)) - 1",
        ),
        Bug(
            "first_child_alone",
            "numbers",
            "shared.tokens[child] != target) child = shared.next_sibling[child]",
            "shared.tokens[child] != target) child = -1",
        ),
        Bug("parent_after_its_child", "numbers", "parent < 0 || parent >= node", "parent < 0 || parent >= nodes"),
        Bug("root_with_a_parent", "numbers", "node == 0 ? parent >= 0 : ", "node == 0 ? false : "),
        Bug("links_backwards", "numbers", "(to > node && to < nodes)", "(to >= 0 && to < nodes)"),
        Bug("links_past_the_nodes", "numbers", "(to > node && to < nodes)", "to > node"),
        Bug(
            "path_cut", "numbers", "    flags |= KDTREE_PATH_TOO_LONG;\n    length = 0;", "    length = args.max_path;"
        ),
        Bug("bonus_of_the_root", "numbers", "shared.targets[shared.path[length - 1]]", "shared.targets[0]"),
        Bug("row_in_the_request", "numbers", "static_cast<int32_t>(first + node);", "node;"),
        Bug(
            "predicts_of_the_rejected",
            "numbers",
            "args.predicts[row] = 0;\n  }",
            "args.predicts[row] = static_cast<int32_t>(target);\n  }",
        ),
    ],
    "kv_compact": [
        Bug(
            "stored_before_it_is_read",
            "numbers",
            "if (from + i < length) rows[i] = *at(shared.path[from + i]);",
            "if (from + i < length) *at(from + i) = rows[i] = *at(shared.path[length - 1 - i - from]);",
        ),
        Bug("path_may_fall", "numbers", "node <= path[i - 1]", "false"),
        Bug("path_without_the_root", "numbers", "i == 0 ? node != 0 : ", "i == 0 ? false : "),
        Bug("nodes_past_the_request", "asan", "bad_path || node >= nodes || ", "bad_path || "),
        Bug("slots_outside", "numbers", "return slot >= 0 && slot < args.num_slots ? slot : -1;", "return slot;"),
        Bug("pages_outside", "asan", "if (page < 0 || page > args.num_slots / args.page_size) return -1;", ""),
        Bug("columns_outside", "asan", "column >= args.page_table_columns", "false"),
        Bug("moves_what_is_bad", "asan", "if (status != KDTREE_REQUEST_OK) length = 0;", ""),
        Bug("length_not_checked", "asan", "length < 0 || length > nodes || length > args.max_path", "false"),
        Bug("first_layer_alone", "numbers", "base + layer * args.layer_stride", "base"),
        Bug("start_of_every_page", "numbers", " + position % args.page_size", ""),
        Bug("frees_the_committed", "numbers", "shared.slots[length + i]", "shared.slots[i]"),
        Bug("misaligned_layers", "asan", "reinterpret_cast<uintptr_t>(base) % sizeof(Unit) == 0", "true"),
    ],
}
SUBJECTS = [(op, bug) for op, bugs in BUGS.items() for bug in bugs]


def is_right(path: Path) -> bool:
    """Whether the library's op, named second on the command line, agrees with the oracle."""
    place = Place("host", path)
    for case in CASES[sys.argv[2]]:
        found = differences(case.run(place), case.answer())
        if found:
            print(case, found)
            return False
    return True


def source_of(op: str) -> Path:
    return host_build.KERNELS / op / f"{op}.cu"


def run(op: str, bug: Bug | None, variant: host_build.Variant, folder: Path) -> subprocess.CompletedProcess[str]:
    return injected_bugs.run(__name__, source_of(op), bug, variant, folder, op)


@pytest.mark.parametrize("variant", ["plain", "race", "asan"])
@pytest.mark.parametrize("op", BUGS)
def test_without_a_bug_every_tool_is_silent(op: str, variant: host_build.Variant, tmp_path: Path) -> None:
    result = run(op, None, variant, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]


@pytest.mark.parametrize(("op", "bug"), SUBJECTS, ids=map(str, (bug for _, bug in SUBJECTS)))
def test_bug_is_caught(op: str, bug: Bug, tmp_path: Path) -> None:
    injected_bugs.assert_caught(bug, source_of(op), run(op, bug, bug.variant, tmp_path))


if __name__ == "__main__":
    sys.exit(injected_bugs.judge(is_right))
