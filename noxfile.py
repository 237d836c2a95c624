# /// script
# dependencies = ["nox>=2025.2.9"]
# ///
"""The pipeline: `nox -s phase2` builds, proves phases 0, 1 and 2; `nox -s tests` also asks for the status.

Phases 0 to 2 need numpy and h5py, not torch, and no GPU: kernels then run on the host build of the same sources. Where
there is a GPU, a phase runs on it as well. Every session installs what it needs; nothing else reaches the network.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
BUILD = "build/cmake"
EVIDENCE = "build/evidence"
ENVIRONMENT = {
    "PYTHONPATH": str(Path("src").resolve()),
    "KDTREE_ENGINE_LIBRARY_DIR": str(Path(BUILD).resolve()),
    # The oracle's matrices are small: threads inside a product cost more than they bring.
    "OPENBLAS_NUM_THREADS": "1",
}


def install(session: nox.Session, *groups: str) -> None:
    """Install the package's own requirements and dependency groups; the package itself is used from src/."""
    requirements = nox.project.dependency_groups(PYPROJECT, *groups)
    session.install(*PYPROJECT["project"]["dependencies"], *requirements)
    session.env.update(ENVIRONMENT)


def output(session: nox.Session, *command: str) -> str:
    """What a command prints, stripped; empty when it fails."""
    printed = session.run(*command, silent=True, log=False, external=True, success_codes=range(256))
    return (printed or "").strip()


def has_gpu(session: nox.Session) -> bool:
    """Whether kernels can run on a GPU here: one answers, and `build` had an nvcc."""
    if not Path(BUILD, "libkdtree.so").is_file() or shutil.which("nvidia-smi") is None:
        return False
    return output(session, "nvidia-smi", "-L").startswith("GPU ")


def gate(session: nox.Session, phase: str) -> None:
    """Run a whole gate; it takes no selection, since a part of it proves nothing (`parity` does)."""
    command = ["pytest", f"phases/{phase}", "--evidence", EVIDENCE]
    session.run(*command, "-n", "auto")
    if has_gpu(session):
        session.install(*nox.project.dependency_groups(PYPROJECT, "gpu"))
        session.run(*command, "--place", "cuda", "-n", "4")


def status_table(session: nox.Session, *options: str) -> None:
    session.run("python", "-m", "kdtree_engine", "status", *options)


def require(session: nox.Session, *phases: str) -> None:
    """The status table; fails unless every one of the phases is proven on the host."""
    status_table(session, *(word for phase in phases for word in ("--require", f"{phase}@host")))


@nox.session
def build(session: nox.Session) -> None:
    """Compile the kernels for the host, and for GPUs with the nvcc of the machine or of the registry."""
    install(session, "build")
    find = ("python", "-m", "kdtree_engine.toolchain", "nvcc")
    if not output(session, *find) and output(session, "python", "-m", "kdtree_engine.toolchain", "wheels") == "yes":
        session.log("no usable nvcc on this machine: taking the registry's")
        session.install(*nox.project.dependency_groups(PYPROJECT, "cuda"))
    nvcc = (session.run(*find, silent=True) or "").strip()
    options = [f"-DKDTREE_NVCC={nvcc}"] if nvcc else ["-DKDTREE_CUDA=OFF"]
    options += ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    session.run("cmake", "-S", "kernels", "-B", BUILD, *options, silent=True)
    session.run("cmake", "--build", BUILD)
    session.run("python", "-m", "kdtree_engine", "kernels")


@nox.session(requires=["build"])
def phase0(session: nox.Session) -> None:
    """Toolchain confirm: compilers, C interface, oracle, bundles, host runtime, resources of every kernel."""
    install(session, "test", "build", "wheel", "cuda")
    session.run("python", "-m", "kdtree_engine.toolchain")
    gate(session, "phase0")


@nox.session(requires=["phase0"])
def phase1(session: nox.Session) -> None:
    """FP32 dense kernels: token-exact on every bundle, on the host and on this machine's GPU."""
    install(session, "test")
    gate(session, "phase1")
    require(session, "phase0", "phase1")


@nox.session(requires=["phase1"])
def phase2(session: nox.Session) -> None:
    """Paged bf16 kernels: token-exact on every bundle, on the host and on this machine's GPU."""
    install(session, "test")
    gate(session, "phase2")
    require(session, "phase0", "phase1", "phase2")


@nox.session(requires=["phase2"])
def phase3(session: nox.Session) -> None:
    """Integration: SGLang's own classes run our kernel; installs SGLang and the torch that goes with it."""
    install(session, "test", "sglang")
    # Its own requirements are a GPU's; what its attention needs on a CPU is in the group.
    session.install("--no-deps", *nox.project.dependency_groups(PYPROJECT, "sglang-alone"))
    gate(session, "phase3")
    require(session, "phase0", "phase1", "phase2", "phase3")


@nox.session(requires=["phase2"])
def tests(session: nox.Session) -> None:
    """Everything that needs no torch: all phases, then the status they amount to."""
    install(session)
    require(session, "phase0", "phase1", "phase2")


@nox.session(requires=["build"])
def parity(session: nox.Session) -> None:
    """A free selection of tests: `nox -s parity -- -k flash -n 4`; `--place cuda` runs them on the GPU."""
    install(session, "test", *(["gpu"] if "cuda" in session.posargs else []))
    chosen = any(argument.startswith("phases/") for argument in session.posargs)
    session.run("pytest", *([] if chosen else ["phases/phase1", "phases/phase2"]), *session.posargs)


@nox.session
def bundle(session: nox.Session) -> None:
    """Make, add, check or show bundles: `nox -s bundle -- add FILE`."""
    install(session, *(["capture"] if "make" in session.posargs else []))
    session.run("python", "-m", "phases.bundles", *(session.posargs or ["check"]))


@nox.session(requires=["build"])
def capture(session: nox.Session) -> None:
    """Test the capture of transformers models against the oracle; installs torch and transformers."""
    install(session, "test", "capture")
    session.run("pytest", "phases/capture", *(session.posargs or ["-n", "auto"]))


@nox.session(requires=["build"])
def bench(session: nox.Session) -> None:
    """Time the kernels on this machine's GPU; without one, the host build against itself."""
    install(session, *(["gpu"] if has_gpu(session) else []))
    session.run("python", "-m", "benchmarks.verify_attn", *session.posargs)


@nox.session
def status(session: nox.Session) -> None:
    """Which phase is proven where: `nox -s status -- --json`."""
    install(session)
    status_table(session, *session.posargs)


@nox.session(requires=["build"], default=False)
def resources(session: nox.Session) -> None:
    """Rewrite kernels/resources.toml from what `build` compiled, once the change has been looked at."""
    install(session, "cuda")
    command = ("python", "-m", "kdtree_engine.toolchain", "resources", f"{BUILD}/libkdtree.so")
    session.run(*command, "--write", "kernels/resources.toml")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy and clang-format; `nox -s lint -- --fix` corrects instead of complaining."""
    install(session, "lint")
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []))
    session.run("ruff", "format", *([] if fix else ["--check"]))
    sources = output(session, "git", "ls-files", "-co", "--exclude-standard", "*.cu", "*.cuh", "*.h", "*.cpp", "*.c")
    session.run("clang-format", *(["-i"] if fix else ["--dry-run", "-Werror"]), *sources.split())
    session.run("mypy")
