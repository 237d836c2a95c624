"""Builds small host libraries for tests: kernel sources with the fiber runtime of kernels/host.

Objects are kept by what they are made of, so that tests, workers and sessions share them. The flags
of each variant are those of the product's own build, kernels/host/*.flags.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kdtree_engine import library as find_library

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"
BUILD = ROOT / "build" / "host_tests"

Variant = Literal["plain", "asan", "race"]


class HostBuildError(Exception):
    """No compiler, or it refused a source; one line, then the compiler's output."""


@functools.cache
def compiler() -> str:
    """Path of the C++ compiler: $CXX, else g++, else clang++."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++"]:
        path = shutil.which(name)
        if path is not None:
            return path
    raise HostBuildError(
        f"C++ compiler: {wanted or 'g++ and clang++'} not found on PATH; install g++ 12 or newer "
        "(Debian: apt install g++) or set CXX"
    )


@functools.cache
def _compiler_version() -> str:
    result = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True)
    return result.stdout


def _is_clang() -> bool:
    return "clang" in _compiler_version()


@functools.cache
def _architecture_flags() -> tuple[str, ...]:
    """AVX2 where this machine runs it, as the emulated tensor cores gain most from it."""
    if platform.machine() != "x86_64":
        return ()
    cpu = Path("/proc/cpuinfo")
    features = set(cpu.read_text().split()) if cpu.exists() else set()
    wide = {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"} <= features
    # The fiber switch does not keep a shadow stack.
    return ("-fcf-protection=none", *(("-march=x86-64-v3",) if wide else ()))


def flags(variant: Variant) -> list[str]:
    """Compiler flags of a variant."""
    files = [KERNELS / "host" / f"{name}.flags" for name in ("common", variant)]
    return [
        *(flag for file in files for flag in file.read_text().split()),
        *_architecture_flags(),
        "-DKDTREE_SIMT_MANY_LIBRARIES",
        f"-I{KERNELS}",
        f"-I{KERNELS / 'include'}",
    ]


def _run(command: Sequence[str], what: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise HostBuildError(f"{what}: {compiler()} failed\n{result.stderr}")


@functools.cache
def _headers_digest() -> bytes:
    digest = hashlib.sha256()
    for header in sorted([*KERNELS.rglob("*.h"), *KERNELS.rglob("*.cuh")]):
        digest.update(header.read_bytes())
    return digest.digest()


def _cached(key: bytes, stem: str, suffix: str, command: Sequence[str]) -> Path:
    """The file that `command` with -o makes, made once."""
    digest = hashlib.sha256("\0".join(command).encode())
    digest.update(_compiler_version().encode() + _headers_digest() + key)
    target = BUILD / f"{stem}-{digest.hexdigest()[:16]}{suffix}"
    if target.exists():
        return target
    BUILD.mkdir(parents=True, exist_ok=True)
    # One worker builds, the others wait for it; the lock goes with the process that holds it.
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unfinished = target.with_suffix(f".{os.getpid()}.tmp")
            _run([*command, "-o", str(unfinished)], stem)
            unfinished.replace(target)
    return target


def compile_object(source: Path, variant: Variant, extra_flags: Sequence[str] = ()) -> Path:
    """The object file of one source."""
    command = [compiler(), *flags(variant), *extra_flags, "-x", "c++", "-c", str(source)]
    return _cached(source.read_bytes(), f"{source.stem}-{variant}", ".o", command)


def runtime_objects(extra_flags: Sequence[str] = ()) -> list[Path]:
    """Objects of the fiber runtime, never instrumented and the same in every variant."""
    sources = sorted((KERNELS / "host").glob("*.cpp"))
    return [compile_object(source, "plain", extra_flags) for source in sources]


def library(sources: Sequence[Path], variant: Variant = "plain", runtime_flags: Sequence[str] = ()) -> Path:
    """A shared library of kernel sources in one variant, with the runtime.

    Raises:
        HostBuildError: there is no compiler, or it refused a source.
    """
    objects = [compile_object(source, variant) for source in sources]
    objects += runtime_objects(runtime_flags)
    command = [compiler(), "-shared", *map(str, objects), "-pthread", "-ldl", "-Wl,-z,defs"]
    if variant == "asan":
        # The sanitizers' symbols come from the process that loads the library.
        command.remove("-Wl,-z,defs")
        command.append("-fsanitize=address,undefined")
        if _is_clang():
            command.append("-shared-libasan")
    return _cached(b"", f"{sources[0].stem}-{variant}", ".so", command)


def sources() -> list[Path]:
    """Sources of the product's host library."""
    ops = ("verify_attn", "merge_partials", "tree_build", "tree_accept", "kv_compact")
    return [*(source for op in ops for source in sorted(KERNELS.glob(f"{op}/*.cu"))), KERNELS / "capi.cu"]


def product(variant: Variant) -> Path:
    """The product's host library in a build variant: that of the usual build if it is up to date, else a new one."""
    built = find_library("host").path.with_name(f"libkdtree_host_{variant}.so")
    if built.exists():
        files = [path for path in KERNELS.rglob("*") if path.suffix in {".cu", ".cuh", ".cpp", ".h", ".flags"}]
        if built.stat().st_mtime > max(path.stat().st_mtime for path in files):
            return built
    return library(sources(), variant)


def asan_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a Python process that may load an asan library."""
    names = ["libasan.so", "libstdc++.so"]
    if _is_clang():
        names[0] = f"libclang_rt.asan-{platform.machine()}.so"
    paths = [
        subprocess.run(
            [compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in names
    ]
    return {
        **(os.environ if environment is None else environment),
        "LD_PRELOAD": " ".join(paths),
        # Python frees little at exit, which is not a leak of ours.
        "ASAN_OPTIONS": "detect_leaks=0",
    }


def under_asan(module: str, *options: str) -> Any:
    """What `python -m module LIBRARY options` prints as JSON, in a process of its own with the sanitized library.

    A finding of AddressSanitizer or UndefinedBehaviorSanitizer ends that process; AssertionError holds the report.
    """
    command = [sys.executable, "-m", module, str(product("asan")), *options]
    done = subprocess.run(command, env=asan_environment(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
