"""The shape of the repository and of the wheel: what keeps the folders' promises."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from typing import TYPE_CHECKING

import pytest

from kdtree_engine import library
from phases.conftest import ROOT

if TYPE_CHECKING:
    from pathlib import Path

KERNEL_SOURCES = sorted(
    path for path in (ROOT / "kernels").rglob("*") if path.suffix in {".cu", ".cuh", ".h", ".cpp", ".c"}
)
PYTHON_SOURCES = sorted(path for folder in ("src", "phases", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Top-level names a Python file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("folder", ["kernels", "fixtures", "plans"])
def test_folders_without_python(folder: str) -> None:
    assert not list((ROOT / folder).rglob("*.py"))


def test_oracle_imports_numpy_only() -> None:
    for path in (ROOT / "oracle").rglob("*.py"):
        assert imports(path) <= {"numpy", "oracle"} | set(sys.stdlib_module_names), path.name


def test_package_imports_neither_oracle_nor_phases() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        assert not imports(path) & {"oracle", "phases", "benchmarks"}, path.name


def test_noxfile_imports_nox_only() -> None:
    assert imports(ROOT / "noxfile.py") <= {"nox"} | set(sys.stdlib_module_names)


def test_kernels_include_no_framework() -> None:
    for path in KERNEL_SOURCES:
        headers = re.findall(r'#\s*include\s*[<"]([^>"]+)', path.read_text())
        assert not [name for name in headers if re.search(r"torch|ATen|Python\.h|pybind|nanobind", name)], path.name


def test_kernels_use_the_common_vocabulary_only() -> None:
    """CUDA headers and inline PTX stand in common/intrinsics.cuh alone, else the two builds would part."""
    for path in KERNEL_SOURCES:
        if path.suffix == ".cu" or (path.suffix == ".cuh" and path.name != "intrinsics.cuh"):
            text = path.read_text()
            assert not re.search(r"cuda_runtime|cuda_bf16|\basm\b|<<<|__shared__", text), path.name


def test_tolerances_stand_in_the_contracts_only() -> None:
    """A literal tolerance beside a comparison with the oracle would be a second, quieter contract."""
    for path in (ROOT / "phases").glob("phase[1-9]/*.py"):
        for call in re.findall(r"\.within\(([^)]*)\)", path.read_text()):
            assert not re.search(r"\d(?:\.\d*)?e-?\d", call), f"{path.name}: {call}"


def test_import_needs_neither_torch_nor_a_library(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import kdtree_engine\n"
        "import kdtree_engine.bundle, kdtree_engine.capture, kdtree_engine.cli, kdtree_engine.evidence\n"
    )
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True)


def test_wheel(tmp_path: Path) -> None:
    """Only kdtree_engine is in it, with its library; it installs, and lists its kernels without a driver."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KDTREE_ENGINE")}
    environment["SKBUILD_CMAKE_DEFINE"] = "KDTREE_CUDA=OFF"
    environment["SKBUILD_BUILD_DIR"] = str(tmp_path / "build")
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(ROOT)]
    built = subprocess.run(build, env=environment, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.glob("*.whl")
    assert re.fullmatch(r"kdtree_engine-[\d.]+-py3-none-(linux|macosx)_\w+\.whl", wheel.name), wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"kdtree_engine"}
    assert "kdtree_engine/libkdtree_host.so" in names
    assert not [name for name in names if name.endswith((".cu", ".h5"))]

    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, capture_output=True)
    code = "import kdtree_engine as k; print(*(info.name for info in k.library('host').kernels))"
    search = os.pathsep.join([str(site), *(path for path in sys.path if "site-packages" in path)])
    listed = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": search},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert listed == [info.name for info in library("host").kernels]


def test_versions_agree() -> None:
    import kdtree_engine

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == kdtree_engine.__version__
