"""The C interface: the header is plain C, the libraries export it and nothing else, ctypes sees the same structs."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from kdtree_engine import _native, library, toolchain
from kdtree_engine.ops.verify_attn import _Args
from phases.conftest import ROOT

if TYPE_CHECKING:
    from pathlib import Path

INCLUDE = ROOT / "kernels" / "include"
HEADER = (INCLUDE / "kdtree" / "capi.h").read_text()
STRUCTS = {"kdtree_verify_attn_args": _Args, "kdtree_kernel_info": _native._KernelRow}


def run(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_version() -> None:
    (version,) = re.findall(r"#define KDTREE_ABI_VERSION (\d+)", HEADER)
    assert int(version) == _native.ABI_VERSION


@pytest.mark.parametrize("language", ["-xc -std=c99", "-xc++ -std=c++98", "-xc++ -std=c++20"])
def test_header_stands_alone(language: str, tmp_path: Path) -> None:
    source = tmp_path / "header.c"
    source.write_text("#include <kdtree/capi.h>\n")
    flags = ("-Wall", "-Wextra", "-Wno-long-long", "-pedantic", "-Werror", "-fsyntax-only", f"-I{INCLUDE}")
    run(toolchain.find_cxx().path, *language.split(), *flags, source)


@pytest.mark.parametrize("place", ["host", "cuda"])
def test_exports(place: _native.Place) -> None:
    """Every declared function and nothing else of ours; weak template instances of the C++ library come and go."""
    declared = set(re.findall(r"^KDTREE_API .*?\b(kdtree_\w+)\(", HEADER, re.MULTILINE))
    nm = shutil.which("nm")
    assert nm is not None, "nm comes with the C++ compiler's binutils"
    rows = [line.split() for line in run(nm, "-D", "--defined-only", library(place).path).splitlines()]
    assert {row[-1] for row in rows if row[-2] not in set("VWuwv")} == declared
    assert declared >= {f"kdtree_{info.name}" for info in library(place).kernels}


def test_no_driver_is_needed_to_load() -> None:
    """The CUDA runtime is inside, the driver is looked for at the first call."""
    libraries = run("readelf", "-d", library("cuda").path)
    assert "libstdc++" in libraries
    assert "libcuda" not in libraries


@pytest.mark.parametrize("name", STRUCTS)
def test_ctypes_sees_the_same_struct(name: str, tmp_path: Path) -> None:
    """Size, and offset and size of every field, in the order of the header."""
    struct = STRUCTS[name]
    (body,) = re.findall(rf"typedef struct {name} {{(.*?)}} {name};", HEADER, re.DOTALL)
    fields = re.findall(r"(\w+);", re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL))
    assert fields == [field[0] for field in struct._fields_]
    lines = [f'printf("%zu %zu\\n", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));' for field in fields]
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text(
        "#include <cstddef>\n#include <cstdio>\n#include <kdtree/capi.h>\n"
        f'int main() {{ printf("%zu\\n", sizeof({name})); {" ".join(lines)} }}\n'
    )
    run(toolchain.find_cxx().path, f"-I{INCLUDE}", source, "-o", program)
    size, *layout = run(program).splitlines()
    assert int(size) == ctypes.sizeof(struct)
    assert layout == [f"{getattr(struct, field).offset} {getattr(struct, field).size}" for field in fields]
