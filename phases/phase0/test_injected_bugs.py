"""Each bug that the host build is meant to find is put into a kernel; its tool has to find it.

A bug is one replacement in kernels/conformance/pipeline.cu. The clean source passes everywhere
without a report and with the same bits, so what a tool says means something.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from phases import host_build
from phases.phase0 import pipeline

if TYPE_CHECKING:
    from pathlib import Path

    from phases.host_build import Variant

SOURCE = host_build.KERNELS / "conformance" / "pipeline.cu"
ORDERS = ["forward", "reverse", "random:1"]
COPIES = ["lazy", "eager"]


@dataclass(frozen=True)
class Bug:
    """What is replaced, and what each tool has to say about it."""

    old: str
    new: str
    # Of the race checker: text of the two source lines that it has to name.
    race: tuple[str, ...] = ()
    # Pattern of the runtime's own report, in every order.
    report: str = ""
    # Pattern of the sanitizers' report; the text of the source line in it.
    asan: tuple[str, ...] = ()
    # Copy modes in which a plain run gives wrong numbers in every order, and the clean ones.
    wrong: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()


LOAD = "*reinterpret_cast<float4*>(&shared.keys[key][column]) = values;"
DOT = "warp_sum(fmaf(query[r][0], row[lane], query[r][1] * row[lane + 32]))"
WEIGHTED = "sums[r][i] = fmaf(weight, keys[key * kDim + i * 32 + lane], sums[r][i]);"
FETCH = "cp_async_16_zfill(&shared.kv[tile % 2][key][column]"
READ_QUERY = "ldmatrix_x4(a, &shared.q["
SCORES_READY = "__syncthreads();  // the scores of all dimensions are there"

BUGS = {
    "no_barrier_after_tile_load": Bug(
        old="__syncthreads();  // the tile is complete",
        new="",
        race=(LOAD, DOT),
        wrong=("lazy", "eager"),
    ),
    "no_barrier_at_end_of_tile_loop": Bug(
        old="__syncthreads();  // the tile has been read by all warps\n",
        new="\n",
        race=(LOAD, "row[lane]|weight, keys"),
        wrong=("lazy", "eager"),
    ),
    "no_wait_for_copies": Bug(
        old="cp_async_wait<1>();",
        new="",
        race=(FETCH, "&kv[lane"),
        report=rf"cp.async copies never waited for, the first issued at {{{FETCH}}}",
    ),
    "no_barrier_after_wait": Bug(
        old="__syncthreads();  // the tile has landed for all warps",
        new="",
        race=("ldmatrix_x4(", "cp_async_16_zfill|reinterpret_cast<uint4"),
        wrong=("lazy", "eager"),
    ),
    "no_barrier_before_next_copy": Bug(
        old="__syncthreads();  // the tile has been read by all warps, its buffer is free",
        new="",
        race=(FETCH, "ldmatrix_x4_trans(b, &kv["),
        wrong=("eager",),
        missed=("lazy",),
    ),
    "no_syncwarp_before_overwrite": Bug(
        old="__syncwarp();  // the old maximum has been read by all lanes of the row",
        new="",
        race=("shared.row_max[row] = maximum", "previous = shared.row_max[row]"),
        missed=("lazy", "eager"),
    ),
    "barrier_skipped_by_a_warp": Bug(
        old=SCORES_READY,
        new=f"if (warp != 3) {SCORES_READY}",
        report=r"divergent barrier 0: (?=.*{if (warp != 3)}).*{__syncthreads();  // weights}",
    ),
    "two_barriers_for_one": Bug(
        old=SCORES_READY,
        new="if (warp == 0) {\n__syncthreads();  // one\n} else {\n__syncthreads();  // other\n}",
        report=r"divergent barrier 0: (?=.*{ // one}).*{ // other}",
    ),
    "row_state_not_initialised": Bug(
        old="if (threadIdx.x < kRows) shared.row_sum[threadIdx.x] = 0;",
        new="",
        wrong=("lazy", "eager"),
    ),
    "write_past_output": Bug(
        old="if (first_row + r >= num_rows) continue;",
        new="",
        asan=("heap-buffer-overflow.*WRITE of size 4", "out[(first_row + r) * kDim"),
    ),
    "read_past_shared_memory": Bug(
        old="keys[key * kDim + i * 32 + lane], sums",
        new="keys[(key + 1) * kDim + i * 32 + lane], sums",
        asan=("heap-buffer-overflow.*READ of size 4", "sums[r][i] = fmaf(weight"),
    ),
    "index_past_shared_array": Bug(
        old="shared.weights[warp][lane] =",
        new="shared.weights[warp][lane + 1] =",
        asan=("runtime error: index 32 out of bounds", "shared.weights[warp][lane + 1] ="),
    ),
    "misaligned_vector_load": Bug(
        old="reinterpret_cast<const float4*>(k + (",
        new="reinterpret_cast<const float4*>(k + 1 + (",
        asan=("runtime error: .* misaligned address", "values = *reinterpret_cast<const float4*>"),
    ),
    "wild_page_index": Bug(
        old="page = page_table[blockIdx.x * num_tiles + tile];",
        new="page = page_table[blockIdx.x * num_tiles + tile] + 1;",
        asan=("bytes of its source at 0x[0-9a-f]+ may not be accessed", FETCH),
    ),
}


def build(bug: str, variant: Variant) -> tuple[Path, list[str]]:
    """A library with the bug in it, and the lines of its source."""
    text = SOURCE.read_text()
    assert text.count(BUGS[bug].old) == 1
    text = text.replace(BUGS[bug].old, BUGS[bug].new)
    # Always at the same place, so that the objects of an earlier session serve again.
    source = host_build.BUILD / "bugs" / bug / SOURCE.name
    source.parent.mkdir(parents=True, exist_ok=True)
    unfinished = source.with_suffix(f".{variant}.tmp")
    unfinished.write_text(text)
    unfinished.replace(source)
    return host_build.library([source], variant), text.splitlines()


def numbers_of(text: str, lines: list[str]) -> list[int]:
    """Lines of the source that hold one of the texts, which "|" separates."""
    numbers = [i for i, line in enumerate(lines, 1) if any(t in line for t in text.split("|"))]
    assert numbers, text
    return numbers


def run_in_sanitizer(library: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phases.phase0.pipeline", str(library), str(out)],
        env=host_build.asan_environment(),
        cwd=host_build.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(params=COPIES)
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KDTREE_SIMT_ASYNC", request.param)
    return str(request.param)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KDTREE_SIMT_ORDER", request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def clean() -> pipeline.Outputs:
    """The clean kernels' outputs in the default mode."""
    return pipeline.run(host_build.library([SOURCE]))


def assert_same_bits(actual: pipeline.Outputs, clean: pipeline.Outputs) -> None:
    for name in pipeline.Outputs._fields:
        ours, theirs = getattr(actual, name), getattr(clean, name)
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32), err_msg=name)


def test_clean_kernels_are_right(clean: pipeline.Outputs) -> None:
    expected_float, expected_paged = pipeline.expected()
    # A few hundred roundings of 2^-24 (64 dims, 75 keys, weights of at most 1) of |k| <= 5.
    np.testing.assert_allclose(clean.attend_float, expected_float, rtol=0, atol=1e-4)
    # Weights are rounded to bf16, 2^-9 relative, and |k| <= 5.
    np.testing.assert_allclose(clean.attend_paged, expected_paged, rtol=0, atol=5 * 2**-9 * 2)


@pytest.mark.usefixtures("order", "copies")
@pytest.mark.parametrize("threads", ["1", "3"])
def test_clean_kernels_do_not_depend_on_the_schedule(
    threads: str, clean: pipeline.Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDTREE_SIMT_THREADS", threads)
    assert_same_bits(pipeline.run(host_build.library([SOURCE])), clean)


@pytest.mark.usefixtures("order", "copies")
def test_clean_kernels_have_no_race(clean: pipeline.Outputs) -> None:
    assert_same_bits(pipeline.run(host_build.library([SOURCE], "race")), clean)


@pytest.mark.usefixtures("order", "copies")
def test_clean_kernels_pass_the_sanitizers(clean: pipeline.Outputs, tmp_path: Path) -> None:
    result = run_in_sanitizer(host_build.library([SOURCE], "asan"), tmp_path / "out.npz")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    with np.load(tmp_path / "out.npz") as stored:
        assert_same_bits(pipeline.Outputs(stored["arr_0"], stored["arr_1"]), clean)


@pytest.mark.usefixtures("order", "copies")
@pytest.mark.parametrize("bug", [name for name, bug in BUGS.items() if bug.race])
def test_race_checker_finds(bug: str) -> None:
    library, lines = build(bug, "race")
    with pytest.raises(pipeline.PipelineError, match=r"race at byte .* no barrier between them") as caught:
        pipeline.run(library)
    named = [int(number) for number in re.findall(rf"{bug}/pipeline.cu:(\d+)", str(caught.value))]
    assert len(named) == 2, caught.value
    first, second = (numbers_of(text, lines) for text in BUGS[bug].race)
    assert (named[0] in first and named[1] in second) or (named[1] in first and named[0] in second), (
        f"{caught.value}: {[lines[number - 1] for number in named]}"
    )


@pytest.mark.usefixtures("order", "copies")
@pytest.mark.parametrize("bug", [name for name, bug in BUGS.items() if bug.report])
def test_runtime_reports(bug: str) -> None:
    library, lines = build(bug, "plain")

    def place(match: re.Match[str]) -> str:
        (number,) = numbers_of(match[1], lines)
        return rf"{bug}/pipeline\.cu:{number}\b"

    pattern = re.sub(r"\{(.+?)\}", place, BUGS[bug].report)
    with pytest.raises(pipeline.PipelineError, match=pattern):
        pipeline.run(library)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("bug", [name for name, bug in BUGS.items() if bug.wrong or bug.missed])
def test_numbers_show(bug: str, copies: str, clean: pipeline.Outputs) -> None:
    """Poison and the schedule make most bugs visible; what they miss is written down too."""
    actual = pipeline.run(build(bug, "plain")[0])
    if copies in BUGS[bug].missed:
        assert_same_bits(actual, clean)
    else:
        assert any(not np.allclose(ours, theirs, rtol=0, atol=1e-2) for ours, theirs in zip(actual, clean, strict=True))


@pytest.mark.parametrize("bug", [name for name, bug in BUGS.items() if bug.asan])
def test_sanitizers_find(bug: str, tmp_path: Path) -> None:
    library, lines = build(bug, "asan")
    pattern, text = BUGS[bug].asan
    result = run_in_sanitizer(library, tmp_path / "out.npz")
    assert result.returncode != 0
    assert re.search(pattern, result.stderr, re.DOTALL), result.stderr
    (number,) = numbers_of(text, lines)
    assert f"{bug}/pipeline.cu:{number}" in result.stderr, result.stderr
