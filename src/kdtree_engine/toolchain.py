"""The compilers and disassemblers of this machine, and what they say about a kernel library.

    python -m kdtree_engine.toolchain             compilers, versions, architectures; 1 when one is missing or broken
    python -m kdtree_engine.toolchain nvcc        the path of nvcc; nothing when there is none, 1 when it is broken
    python -m kdtree_engine.toolchain wheels      whether the registry has an nvcc for this platform, yes or no
    python -m kdtree_engine.toolchain resources LIBRARY [--write FILE]   the resource table of a CUDA library

nvcc is taken from CUDA_HOME, PATH, the usual prefix, else from the registry's wheels (dependency group `cuda`): the
first that compiles an empty kernel for sm_90 and sm_120a. One that CUDA_HOME names has to.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kdtree_engine.errors import ToolchainError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

USUAL_PREFIX = Path("/usr/local/cuda")
# What a library has machine code for, unless its build was told otherwise.
ARCHS = ("sm_90", "sm_120a")
# What an SM of sm_120 offers a block; kernels keep to it everywhere.
MAX_SHARED_BYTES = 101_376


@dataclass(frozen=True)
class Tool:
    """A program that answered.

    Attributes:
        name: what it is.
        path: where it is.
        version: what it says of itself, as "13.0.88".
        source: where it was looked for: "CUDA_HOME", "PATH", "prefix" or "wheels".
    """

    name: str
    path: Path
    version: str
    source: str


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one architecture.

    Attributes:
        registers: per thread.
        stack: bytes per thread; more than 0 where registers were spilled or an array is indexed at run time.
        spills: local-memory instructions (LDL, STL) in its machine code.
    """

    registers: int
    stack: int
    spills: int


def _wheel_folders() -> list[Path]:
    """`bin` folders of CUDA wheels in this environment, newest first."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    return sorted((folder for root in roots for folder in Path(root).glob("cu*/bin")), reverse=True)


def _candidates(program: str) -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("CUDA_HOME"):
        yield "CUDA_HOME", Path(home) / "bin" / program
    if found := shutil.which(program):
        yield "PATH", Path(found)
    yield "prefix", USUAL_PREFIX / "bin" / program
    for folder in _wheel_folders():
        yield "wheels", folder / program


def _answer(command: Sequence[str | Path], remedy: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"{command[0]} cannot be run ({error}); {remedy}") from error
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines() or ["no output"]
        said = next((line for line in lines if "error" in line or "fatal" in line), lines[0])
        raise ToolchainError(f"{command[0]} fails with status {result.returncode} ({said.strip()}); {remedy}")
    return result.stdout


@cache
def _working_nvcc(path: Path, source: str) -> Tool:
    remedy = "install CUDA 12.8 or newer and a host compiler that it knows, or this project's dependency group `cuda`"
    version = re.search(r"V(\d+\.\d+\.\d+)", _answer([path, "--version"], remedy))
    if version is None:
        raise ToolchainError(f"{path} does not say a version; {remedy}")
    # Too old an nvcc, or too new a host compiler, shows only when something is compiled.
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty.cu")
        empty.write_text("__global__ void empty_kernel() {}\n")
        gencode = [f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}" for arch in ARCHS]
        _answer([path, "-std=c++20", *gencode, "-c", empty, "-o", empty.with_suffix(".o")], remedy)
    return Tool("nvcc", path, version[1], source)


def find_nvcc() -> Tool | None:
    """The first working nvcc of CUDA_HOME, PATH, the usual prefix and the wheels; None when there is none at all.

    Raises:
        ToolchainError: the nvcc of CUDA_HOME is missing or broken, or there are others and all are broken.
    """
    problem: ToolchainError | None = None
    for source, path in _candidates("nvcc"):
        if not path.is_file():
            if source == "CUDA_HOME":
                raise ToolchainError(f"CUDA_HOME is {path.parent.parent}, which has no bin/nvcc; correct or unset it")
            continue
        try:
            return _working_nvcc(path, source)
        except ToolchainError as error:
            if source == "CUDA_HOME":
                raise
            problem = problem or error
    if problem is not None:
        raise problem
    return None


def find_disassembler(program: str = "cuobjdump") -> Tool:
    """cuobjdump or nvdisasm; ToolchainError when missing. A toolkit without them leaves it to the wheels."""
    remedy = "install this project's dependency group `cuda`"
    for source, path in _candidates(program):
        if path.is_file():
            version = re.search(r"V(\d+\.\d+\.\d+)", _answer([path, "--version"], remedy))
            return Tool(program, path, version[1] if version else "unknown", source)
    raise ToolchainError(f"{program} was not found; {remedy}")


def find_cxx() -> Tool:
    """The C++ compiler of $CXX, else g++, else clang++.

    Raises:
        ToolchainError: there is none, it does not run, or it does not know C++20.
    """
    remedy = "install g++ 12 or newer (Debian: apt install g++; macOS: xcode-select --install), or set CXX"
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++"]:
        if path := shutil.which(name):
            version = re.search(r"\d+\.\d+(\.\d+)?", _answer([path, "--version"], remedy))
            command = [path, "-std=c++20", "-fsyntax-only", "-x", "c++", os.devnull]
            _answer(command, "it needs C++20; " + remedy)
            return Tool(Path(name).name, Path(path), version[0] if version else "unknown", "CXX" if wanted else "PATH")
    raise ToolchainError(f"no C++ compiler: {wanted or 'g++ and clang++'} not on PATH; {remedy}")


def wheels_exist() -> bool:
    """Whether the registry has CUDA wheels for this platform."""
    return platform.system() == "Linux" and platform.machine() in {"x86_64", "aarch64"}


@cache
def sass(library: Path, arch: str) -> dict[str, list[str]]:
    """Machine instructions per kernel of a CUDA library, for one architecture as "sm_120a"."""
    command: list[str | Path] = [find_disassembler().path, "--dump-sass", "--gpu-architecture", arch, library]
    text = _answer(command, "rebuild the library")
    functions = {}
    for part in text.split("Function : ")[1:]:
        symbol, _, body = part.partition("\n")
        opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", body)
        functions[kernel_name(symbol.strip())] = opcodes
    return functions


def kernel_name(symbol: str) -> str:
    """A kernel's name and template arguments from its mangled symbol: "probe_kernel", "flash_kernel<64,512,64>"."""
    # An identifier stands behind its length. Digits before it may belong to a hash, so each reading is tried.
    for match in re.finditer(r"(?=(\d{1,3})([A-Za-z_]))", symbol):
        start = match.start(2)
        name = symbol[start : start + int(match[1])]
        if name.endswith("_kernel") and name.isidentifier():
            # Up to the return type, which is void; a type among the arguments counts by its own numbers.
            arguments = re.match(r"I(.*?)E+v", symbol[start + len(name) :])
            values = re.findall(r"Li(\d+)E", arguments[1] + "E") if arguments else []
            return f"{name}<{','.join(values)}>" if values else name
    return symbol


def resources(library: Path) -> dict[str, dict[str, Resources]]:
    """Per kernel and architecture, what the machine code in a CUDA library takes."""
    text = _answer([find_disassembler().path, "--dump-resource-usage", library], "rebuild the library")
    table: dict[str, dict[str, Resources]] = {}
    for part in text.split("arch = ")[1:]:
        arch = part.split("\n", 1)[0].strip()
        found = re.findall(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+)", part)
        instructions = sass(library, arch) if found else {}
        for symbol, registers, stack in found:
            name = kernel_name(symbol)
            spills = sum(op.split(".")[0] in {"LDL", "STL"} for op in instructions[name])
            table.setdefault(name, {})[arch] = Resources(int(registers), int(stack), spills)
    return table


# An MMA of 16 x 8 x 16 is 4,096 FLOP: four clocks of an sm_120 SM, in which its shared memory moves 512 bytes.
MMA_SHARED_BYTES = 4096 // 1024 * 128
_LDMATRIX_BYTES = {"4": 512, "2": 256}


def fragment_bytes(library: Path, arch: str) -> dict[str, float]:
    """Bytes that `ldmatrix` reads for an MMA, per kernel that has any, counted in the machine code.

    Loads and products stand in the code in the proportion in which the loops run them, but for the queries' fragments,
    which are loaded once. `MMA_SHARED_BYTES` is what sm_120 could read meanwhile; the rest is left for copies, scores
    and weights.
    """
    table = {}
    for kernel, opcodes in sass(library, arch).items():
        products = sum(op.startswith("HMMA") for op in opcodes)
        if products:
            loads = [op for op in opcodes if op.startswith("LDSM")]
            table[kernel] = sum(_LDMATRIX_BYTES.get(op.rsplit(".", 1)[-1], 128) for op in loads) / products
    return table


def excesses(table: dict[str, dict[str, Resources]], shared_bytes: dict[str, int]) -> list[str]:
    """Which kernels break the budget, one line each: spilled registers, or more shared memory than sm_120 offers."""
    lines = [
        f"{kernel} on {arch}: {taken.spills} spill instructions, {taken.stack} bytes of stack; expected none: "
        "give it fewer live registers"
        for kernel, archs in sorted(table.items())
        for arch, taken in sorted(archs.items())
        if taken.spills or taken.stack
    ]
    return lines + [
        f"{kernel}: {size} bytes of shared memory, at most {MAX_SHARED_BYTES} fit; make its tile smaller"
        for kernel, size in sorted(shared_bytes.items())
        if size > MAX_SHARED_BYTES
    ]


def as_toml(nvcc_version: str, table: dict[str, dict[str, Resources]], shared_bytes: dict[str, int]) -> str:
    """The resource table as kernels/resources.toml holds it."""
    lines = [
        "# What ptxas made of every kernel: a change here is a change to be looked at.",
        "# Written by `python -m kdtree_engine.toolchain resources LIBRARY --write kernels/resources.toml`.",
        f'nvcc = "{nvcc_version}"',
        "",
        "[shared_bytes]  # the most dynamic shared memory a block asks for",
        *(f"{kernel} = {size}" for kernel, size in sorted(shared_bytes.items())),
    ]
    for kernel, archs in sorted(table.items()):
        lines += ["", f'[kernels."{kernel}"]']
        for arch, taken in sorted(archs.items()):
            values = ", ".join(f"{name} = {value}" for name, value in asdict(taken).items())
            lines.append(f"{arch} = {{ {values} }}")
    return "\n".join(lines) + "\n"


def _report(as_json: bool) -> int:
    """Prints every tool, or what to do about the missing ones."""
    tools: list[Tool] = []
    problems: list[str] = []
    for find in (find_cxx, find_nvcc, find_disassembler):
        try:
            tool = find()
        except ToolchainError as error:
            problems.append(str(error))
            continue
        if tool is not None:
            tools.append(tool)
        else:
            problems.append("no nvcc: no CUDA kernel is built; install the CUDA toolkit or the dependency group `cuda`")
    if as_json:
        rows = [{**asdict(tool), "path": str(tool.path)} for tool in tools]
        print(json.dumps({"tools": rows, "archs": ARCHS, "problems": problems}, indent=1))
    else:
        for tool in tools:
            archs = f", compiles for {' '.join(ARCHS)}" if tool.name == "nvcc" else ""
            print(f"{tool.name:<10} {tool.version:<10} {tool.path} ({tool.source}){archs}")
        for problem in problems:
            print(problem, file=sys.stderr)
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this module."""
    parser = argparse.ArgumentParser("python -m kdtree_engine.toolchain", description="The compilers of this machine.")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("nvcc", help="print the path of nvcc, or nothing")
    commands.add_parser("wheels", help="print yes when the registry has CUDA wheels for this platform")
    table = commands.add_parser("resources", help="print the resource table of a CUDA library")
    table.add_argument("library", type=Path)
    table.add_argument("--write", type=Path, metavar="FILE", help="write it there")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "nvcc":
            nvcc = find_nvcc()
            if nvcc is not None:
                print(nvcc.path)
            return 0
        if arguments.command == "wheels":
            print("yes" if wheels_exist() else "no")
            return 0
        if arguments.command == "resources":
            return _resources(arguments.library, arguments.write)
        return _report(arguments.json)
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1


def _resources(library: Path, write: Path | None) -> int:
    from kdtree_engine._native import library as load
    from kdtree_engine.bundle import replace_file

    nvcc = find_nvcc()
    shared_bytes = {info.name: info.shared_bytes for info in load(library).kernels}
    table = resources(library)
    text = as_toml(nvcc.version if nvcc else "unknown", table, shared_bytes)
    if write is None:
        print(text, end="")
    else:
        replace_file(write, text.encode())
    for kernel, size in sorted(fragment_bytes(library, "sm_120a").items()):
        print(f"{kernel}: {size:.0f} bytes of fragments an MMA, {size / MMA_SHARED_BYTES:.0%} of what sm_120 can read")
    problems = excesses(table, shared_bytes)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
