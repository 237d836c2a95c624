"""The toolchain: found where it is, both routes compile for real; what is missing or broken is said with a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kdtree_engine import ToolchainError, toolchain
from phases.conftest import ROOT

if TYPE_CHECKING:
    from pathlib import Path

# Instructions of the probe, by what they are in SASS.
PROBE = {"LDGSTS": "cp.async", "LDSM": "ldmatrix", "HMMA": "mma.sync"}


def compile_library(source: Path, folder: Path, nvcc: Path | None = None) -> Path:
    """A source as a library with both architectures, by the given nvcc or the machine's own choice."""
    if nvcc is None:
        tool = toolchain.find_nvcc()
        assert tool is not None
        nvcc = tool.path
    library = folder / f"lib{source.stem}.so"
    gencode = [f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}" for arch in toolchain.ARCHS]
    kernels = ROOT / "kernels"
    command: list[str | Path] = [
        nvcc,
        *("-std=c++20", *gencode, "-Xcompiler=-fPIC", f"-I{kernels}", f"-I{kernels / 'include'}"),
        *("-shared", "-cudart", "static"),
        *(source, "-o", library),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def check_probe(nvcc: Path, folder: Path) -> None:
    library = compile_library(ROOT / "kernels" / "probe" / "probe.cu", folder, nvcc)
    for arch in toolchain.ARCHS:
        kernels = toolchain.sass(library, arch)
        assert list(kernels) == ["probe_kernel"]
        opcodes = {instruction.split(".")[0] for instruction in kernels["probe_kernel"]}
        missing = [f"{opcode} ({ptx}) on {arch}" for opcode, ptx in PROBE.items() if opcode not in opcodes]
        assert not missing


def wheel_nvcc() -> Path:
    found = [folder / "nvcc" for folder in toolchain._wheel_folders() if (folder / "nvcc").is_file()]
    assert found, "the dependency group `cuda` is not installed in this environment"
    return found[0]


def test_probe_by_the_machines_own_choice(tmp_path: Path) -> None:
    nvcc = toolchain.find_nvcc()
    assert nvcc is not None
    print(f"nvcc {nvcc.version} from {nvcc.source}")
    check_probe(nvcc.path, tmp_path)


def test_probe_by_the_registrys_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a toolkit the wheels are found, and compile and disassemble for sm_120a."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    compilers = {os.path.dirname(toolchain.find_cxx().path), "/usr/bin", "/bin"}  # noqa: PTH120 - PATH holds strings
    bare = tmp_path / "bin"
    bare.mkdir()
    for folder in sorted(compilers):
        for program in ("g++", "gcc", "clang++", "as", "ld", "cat", "sh", "rm", "touch"):
            if os.access(os.path.join(folder, program), os.X_OK) and not (bare / program).exists():  # noqa: PTH118
                (bare / program).symlink_to(os.path.join(folder, program))  # noqa: PTH118
    monkeypatch.setenv("PATH", str(bare))
    monkeypatch.setattr(toolchain, "USUAL_PREFIX", tmp_path / "nowhere")
    nvcc = toolchain.find_nvcc()
    assert nvcc is not None
    assert nvcc.source == "wheels"
    assert nvcc.path == wheel_nvcc()
    check_probe(nvcc.path, tmp_path)


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


ANSWER = 'echo "Cuda compilation tools, release 1.2, V1.2.3"'


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any CUDA: a folder to put programs into."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(toolchain, "USUAL_PREFIX", tmp_path / "prefix")
    monkeypatch.setattr(toolchain, "_wheel_folders", list)
    return tmp_path


def test_order_of_places(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert toolchain.find_nvcc() is None
    sources = {"prefix": "prefix/bin/nvcc", "PATH": "path/nvcc", "CUDA_HOME": "home/bin/nvcc"}
    for source, name in sources.items():
        path = program(bare / name, ANSWER)
        if source == "CUDA_HOME":
            monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
        tool = toolchain.find_nvcc()
        assert tool is not None
        assert (tool.path, tool.version, tool.source) == (path, "1.2.3", source)


# Too old for sm_120a, and a host compiler that it does not know: both answer --version and then fail.
OLD = f'case $1 in --version) {ANSWER};; *) echo "nvcc fatal   : Unsupported gpu architecture" >&2; exit 1;; esac'
HOST = f'case $1 in --version) {ANSWER};; *) echo x; echo "error: unsupported GNU version!" >&2; exit 1;; esac'


@pytest.mark.parametrize("script", [OLD, HOST])
def test_an_nvcc_that_cannot_compile_is_passed_over(script: str, bare: Path) -> None:
    program(bare / "path" / "nvcc", script)
    with pytest.raises(ToolchainError) as raised:
        toolchain.find_nvcc()
    assert "nsupported" in str(raised.value)
    assert "install CUDA 12.8 or newer" in str(raised.value)
    working = program(bare / "prefix" / "bin" / "nvcc", ANSWER)
    tool = toolchain.find_nvcc()
    assert tool is not None
    assert tool.path == working


def test_cuda_home_that_points_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(ToolchainError, match="correct or unset it"):
        toolchain.find_nvcc()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo broken >&2; exit 3", "status 3 (broken)"),
        ("echo hello", "does not say a version"),
        ("kill -9 $$", "fails with status"),
    ],
)
def test_broken_nvcc(script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin" / "nvcc", script)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(ToolchainError) as raised:
        toolchain.find_nvcc()
    assert words in str(raised.value)
    assert "install CUDA 12.8 or newer" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"install g\+\+ 12"):
        toolchain.find_cxx()


def test_compiler_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'case "$*" in *c++20*) echo "unknown option -std=c++20" >&2; exit 1;; *) echo 7.5.0;; esac'
    monkeypatch.setenv("CXX", str(program(tmp_path / "g++", script)))
    with pytest.raises(ToolchainError, match=r"it needs C\+\+20"):
        toolchain.find_cxx()


def test_report_names_compilers_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert toolchain.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [tool["name"] for tool in report["tools"]][1:] == ["nvcc", "cuobjdump"]
    assert all(tool["version"][0].isdigit() for tool in report["tools"])


def test_report_without_anything(tmp_path: Path) -> None:
    """A machine with nothing: every missing tool has its remedy, and the exit status says so."""
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT / "src"), "CUDA_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "kdtree_engine.toolchain"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "install g++ 12" in result.stderr
    assert "CUDA_HOME" in result.stderr
    assert "Traceback" not in result.stderr
