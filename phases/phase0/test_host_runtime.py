"""The host runtime computes what the PTX ISA says and reports what CUDA leaves undefined."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from phases import host_build
from phases.phase0.conformance import CHECKS, ConformanceError, HostMemory, Runner

if TYPE_CHECKING:
    from pathlib import Path

CONFORMANCE = host_build.KERNELS / "conformance"
SOURCES = [CONFORMANCE / "conformance.cu", CONFORMANCE / "faults.cu"]
ORDERS = ["forward", "reverse", "random:1", "random:2"]
POISON = 0xFFFFFFFF
NOTHING = np.zeros(128, np.uint32)


@pytest.fixture(params=["lazy", "eager"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KDTREE_SIMT_ASYNC", request.param)
    return str(request.param)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KDTREE_SIMT_ORDER", request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def checks() -> Runner:
    return Runner(host_build.library(SOURCES), HostMemory())


@pytest.fixture(scope="session")
def faults() -> Runner:
    return Runner(host_build.library(SOURCES), HostMemory(), entry="kdtree_fault")


@pytest.fixture(scope="session")
def races() -> Runner:
    return Runner(host_build.library(SOURCES, "race"), HostMemory(), entry="kdtree_fault")


def line(marker: str) -> str:
    """Where faults.cu says "line: marker", as the runtime writes it."""
    lines = SOURCES[1].read_text().splitlines()
    (number,) = (i for i, text in enumerate(lines, 1) if text.endswith(f"// line: {marker}"))
    return f"conformance/faults.cu:{number}"


@pytest.mark.usefixtures("order", "copies")
@pytest.mark.parametrize("name", CHECKS)
def test_intrinsic(name: str, checks: Runner) -> None:
    CHECKS[name](checks)


@pytest.mark.parametrize("name", CHECKS)
def test_intrinsic_without_a_race(name: str) -> None:
    CHECKS[name](Runner(host_build.library(SOURCES[:1], "race"), HostMemory()))


@pytest.mark.parametrize("name", CHECKS)
def test_intrinsic_on_portable_fibers(name: str) -> None:
    library = host_build.library(SOURCES[:1], runtime_flags=["-DKDTREE_SIMT_UCONTEXT"])
    CHECKS[name](Runner(library, HostMemory()))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("shared_bytes", [4, 1000, 101_376])
def test_shared_memory_starts_as_nan(shared_bytes: int, faults: Runner) -> None:
    out = faults.run("fresh_shared", NOTHING, NOTHING, (shared_bytes // 4,), shared_bytes)
    np.testing.assert_array_equal(out, POISON)


def test_copy_lands_as_late_or_as_early_as_it_may(copies: str, faults: Runner) -> None:
    source = np.arange(32, dtype=np.uint32)
    before, after = faults.run("early_read", source, NOTHING, (2, 32))
    np.testing.assert_array_equal(before, source if copies == "eager" else POISON)
    np.testing.assert_array_equal(after, source)


def test_filled_copy_reads_nothing(faults: Runner) -> None:
    np.testing.assert_array_equal(faults.run("wild_zfill", NOTHING, NOTHING, (32, 4)), 0)


def both(marker: str) -> str:
    """The two lines of a fault, in the order in which the threads happened to come."""
    first, second = line(f"{marker} first"), line(f"{marker} second")
    return rf"(?=.*{first}).*{second}"


FAULTS = {
    "skipped_barrier": r"deadlock: threads 0-95 wait in __syncthreads "
    rf"\({line('skipped_barrier')}\); threads 96-127 returned",
    "divergent_barrier": rf"divergent barrier 0: {both('divergent_barrier')}",
    "lane_returned": rf"deadlock: .*threads 0-4, 6-31 wait in shuffle \({line('lane_returned')}\)",
    "different_collectives": rf"divergent warp: {both('different_collectives')}",
    "different_lines": rf"divergent warp: {both('different_lines')}",
    "mask_without_self": rf"{line('mask_without_self')}\) with mask 0x0000ffff, which leaves out",
    "absent_lane": rf"shuffle \({line('absent_lane')}\): lane 0 reads lane 20, which is not",
    "group_part_of_warp": rf"barrier 1 \({line('group_part_of_warp')}\) is full .*part of warp 0",
    "group_counts_differ": rf"divergent barrier 1: {both('group_counts_differ')}",
    "group_bad_id": rf"group_sync\(16, 128\) at {line('group_bad_id')}: the id must be 1 to 15",
    "misaligned_copy": rf"cp.async \({line('misaligned_copy')}\): .*aligned to 16 bytes",
    "copy_outside_shared": rf"cp.async \({line('copy_outside_shared')}\): .*not in shared memory",
    "null_source": rf"cp.async \({line('null_source')}\): its source is null",
    "unawaited_copy": rf"never waited for, the first issued at {line('unawaited_copy')}",
    "uncommitted_copy": rf"never waited for, the first issued at {line('uncommitted_copy')}",
    "ldmatrix_misaligned": rf"ldmatrix_x2 \({line('ldmatrix_misaligned')}\): .*not 16-byte aligned",
    "ldmatrix_outside_shared": rf"ldmatrix_x2 \({line('ldmatrix_outside_shared')}\): .*not in",
    "type_too_large": rf"{line('type_too_large')} has 16384 bytes, the launch gave 16",
}


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(name: str, faults: Runner) -> None:
    inputs = np.zeros(128, np.uint32)
    with pytest.raises(ConformanceError, match=FAULTS[name]) as caught:
        faults.run(name, inputs, inputs, (128,), 16)
    assert re.match(rf"(kdtree::conformance::)?{name}, block \(0, 0, 0\), thread \d+: ", str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(
    "name",
    ["race_without_barrier", "race_across_shuffle", "race_with_own_row", "race_outside_group"],
)
def test_race_is_reported(name: str, races: Runner) -> None:
    with pytest.raises(ConformanceError, match=rf"race at byte \d+ .*{both(name)}"):
        races.run(name, NOTHING, NOTHING, (128,))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("name", ["ordered_through_groups", "ordered_in_warp", "ordered_bytes"])
def test_ordered_accesses_are_no_race(name: str, races: Runner) -> None:
    races.run(name, NOTHING, NOTHING, (128,))


def test_runtime_works_after_a_fault(checks: Runner, faults: Runner) -> None:
    for _ in range(3):
        with pytest.raises(ConformanceError):
            faults.run("skipped_barrier", NOTHING, NOTHING, (128,))
        CHECKS["group_barriers"](checks)


def test_more_shared_memory_than_sm_120_has_is_refused(faults: Runner) -> None:
    with pytest.raises(ConformanceError, match="needs 101377 bytes of shared memory, sm_120 offers 101376"):
        faults.run("fresh_shared", NOTHING, NOTHING, (1,), 101_377)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KDTREE_SIMT_ORDER", "sideways"),
        ("KDTREE_SIMT_ORDER", "random:"),
        ("KDTREE_SIMT_ASYNC", "never"),
        ("KDTREE_SIMT_THREADS", "0"),
    ],
)
def test_bad_setting_is_refused(variable: str, value: str, checks: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConformanceError, match=f"{variable} must be"):
        CHECKS["votes"](checks)


def test_static_shared_memory_does_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "static_shared.cu"
    source.write_text('#include "common/intrinsics.cuh"\n__global__ void kernel() { __shared__ float x[4]; }\n')
    with pytest.raises(host_build.HostBuildError, match="__shared__"):
        host_build.compile_object(source, "plain")


def test_checks_pass_under_the_address_sanitizer() -> None:
    library = host_build.library(SOURCES, "asan")
    script = (
        "import sys; from pathlib import Path; from phases.phase0.conformance import *\n"
        "runner = Runner(Path(sys.argv[1]), HostMemory())\n"
        "for check in CHECKS.values(): check(runner)\n"
        "print('passed', len(CHECKS))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(library)],
        env=host_build.asan_environment(),
        cwd=host_build.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"passed {len(CHECKS)}\n"
