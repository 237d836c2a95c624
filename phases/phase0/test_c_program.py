"""kernels/example: a C99 program compiled, linked against the host library and run; and against one of another ABI."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from kdtree_engine import library
from phases.conftest import ROOT

if TYPE_CHECKING:
    from pathlib import Path

KERNELS = ROOT / "kernels"


def compiler() -> str:
    for name in [os.environ.get("CC"), "cc", "gcc", "clang"]:
        if name and (path := shutil.which(name)):
            return path
    pytest.fail("no C compiler: install gcc or set CC")


def build(folder: Path, library_path: Path) -> Path:
    program = folder / "verify_attn"
    flags = ("-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-O1")
    source = KERNELS / "example" / "verify_attn.c"
    command: list[str | Path] = [
        compiler(),
        *flags,
        f"-I{KERNELS / 'include'}",
        source,
        library_path,
        "-lm",
        "-o",
        program,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return program


def run(program: Path, libraries: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LD_LIBRARY_PATH": str(libraries)}
    return subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_runs_on_the_host_library(tmp_path: Path) -> None:
    path = library("host").path
    program = build(tmp_path, path)
    for info in library("host").kernels:
        result = run(program, path.parent, info.name)
        assert (result.returncode, result.stdout) == (0, f"{info.name} on host: right\n"), result.stderr


def test_says_so_when_the_library_has_another_abi(tmp_path: Path) -> None:
    """Linked against this library, run with one of a later version in its place."""
    program = build(tmp_path, library("host").path)
    other = tmp_path / "other"
    other.mkdir()
    names = ("verify_attn", "verify_attn_flash", "verify_attn_workspace_size", "last_error", "build_place")
    source = other / "other.c"
    source.write_text(
        "int kdtree_abi_version(void) { return 99; }\n"
        + "".join(f"int kdtree_{name}(void) {{ return -1; }}\n" for name in names)
    )
    target = other / library("host").path.name
    subprocess.run([compiler(), "-shared", "-fPIC", source, "-o", target], check=True)
    result = run(program, other)
    assert result.returncode == 1
    assert result.stdout.startswith("ABI version: the library has 99, this program was compiled for ")
