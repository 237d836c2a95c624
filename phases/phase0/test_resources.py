"""Registers, spills, stack and shared memory of every kernel on every architecture, against kernels/resources.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from typing import TYPE_CHECKING

import pytest

from kdtree_engine import library, toolchain
from kdtree_engine.toolchain import Resources
from phases.conftest import ROOT

if TYPE_CHECKING:
    from pathlib import Path

TABLE = ROOT / "kernels" / "resources.toml"
UPDATE = "look at the change, then record it with: nox -s resources"


@cache
def measured() -> dict[str, dict[str, Resources]]:
    return toolchain.resources(library("cuda").path)


def shared_bytes() -> dict[str, int]:
    return {info.name: info.shared_bytes for info in library("cuda").kernels}


def test_every_kernel_is_within_the_budget() -> None:
    problems = toolchain.excesses(measured(), shared_bytes())
    assert not problems, "\n".join(problems)


def test_fragments_fit_what_shared_memory_moves() -> None:
    """On sm_120 fragment loads take less than shared memory moves in the time of the products, in every instantiation.

    With the 512 wide latent and two row tiles a warp they take at most half, which leaves as much for copies, scores
    and weights (kernel header); a kernel of one row tile reads each fragment for half as many products.
    """
    found = toolchain.fragment_bytes(library("cuda").path, "sm_120a")
    assert any(kernel.startswith("verify_attn_flash_paged_kernel") for kernel in found)
    for kernel, size in found.items():
        if kernel.startswith("verify_attn_flash_paged_kernel"):
            half = kernel.startswith("verify_attn_flash_paged_kernel<512,") and not kernel.endswith(",1>")
            assert size <= toolchain.MMA_SHARED_BYTES * (0.5 if half else 1), kernel


def test_every_kernel_has_code_for_every_architecture() -> None:
    archs = set(library("cuda").archs)
    assert {"sm_90", "sm_120a"} <= archs
    for kernel, rows in measured().items():
        assert set(rows) == archs, kernel
    for info in library("cuda").kernels:
        assert any(kernel.startswith(f"{info.name}_kernel") for kernel in measured()), info.name


def test_table_is_that_of_this_compiler() -> None:
    """Another nvcc may allocate otherwise, within the budget; the table's own nvcc must give the table's numbers."""
    table = tomllib.loads(TABLE.read_text())
    assert table["shared_bytes"] == shared_bytes(), UPDATE
    assert table["kernels"].keys() == measured().keys(), UPDATE
    nvcc = toolchain.find_nvcc()
    assert nvcc is not None
    if nvcc.version != table["nvcc"]:
        print(f"nvcc {nvcc.version} here, {table['nvcc']} in the table: only the budget is checked")
        return
    for kernel, archs in measured().items():
        for arch, taken in archs.items():
            row = Resources(**table["kernels"][kernel][arch])
            assert taken == row, f"{kernel} on {arch}: {taken}, the table has {row}; {UPDATE}"


def test_host_and_cuda_libraries_have_one_table() -> None:
    assert library("host").kernels == library("cuda").kernels


@pytest.mark.parametrize(
    ("taken", "size", "words"),
    [
        (Resources(64, 0, 2), 1000, ["greedy_kernel on sm_90", "2 spill instructions"]),
        (Resources(64, 8, 0), 1000, ["greedy_kernel on sm_90", "8 bytes of stack"]),
        (Resources(64, 0, 0), 101_377, ["greedy", "101377 bytes of shared memory", "101376"]),
    ],
)
def test_excess_names_the_kernel(taken: Resources, size: int, words: list[str]) -> None:
    (line,) = toolchain.excesses({"greedy_kernel": {"sm_90": taken}}, {"greedy": size})
    for word in words:
        assert word in line


def test_a_spilling_kernel_is_caught(tmp_path: Path) -> None:
    """A kernel that must spill, compiled and read the way the real ones are."""
    source = tmp_path / "spill.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024, 2) spill_kernel(float* x) {\n"
        "  float v[64];\n"
        "  for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[63 - i] * v[(i * 7) % 64];\n"
        "}\n"
    )
    from phases.phase0.test_toolchain import compile_library

    found = toolchain.resources(compile_library(source, tmp_path))
    problems = toolchain.excesses(found, {})
    assert len(problems) == 2
    assert all("spill_kernel" in problem for problem in problems)


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_ZN6kdtree12_GLOBAL__N_112probe_kernelEPKtS2_Pf", "probe_kernel"),
        ("_Z12spill_kernelPf", "spill_kernel"),
        (
            "_ZN6kdtree47_GLOBAL__N__01003bb3_14_verify_attn_cu_99259f3918verify_attn_kernelILi256ELi32EEEv4args",
            "verify_attn_kernel<256,32>",
        ),
        (
            "_ZN6kdtree12_GLOBAL__N_130verify_attn_flash_paged_kernelINS0_8GeometryILi512ELi64EEENS0_10NarrowRowsILi2EEEEE"
            "vNS0_6ParamsE",
            "verify_attn_flash_paged_kernel<512,64,2>",
        ),
        (
            "_ZN6kdtree12_GLOBAL__N_130verify_attn_flash_paged_kernelINS0_8GeometryILi512ELi0EEENS0_8WideRowsEEEvNS0_6ParamsE",
            "verify_attn_flash_paged_kernel<512,0>",
        ),
        ("main", "main"),
    ],
)
def test_kernel_name(symbol: str, name: str) -> None:
    assert toolchain.kernel_name(symbol) == name
