"""What a gate run proved, where, and for which sources; and what that is worth for the sources at hand.

Evidence is one JSON file per phase and place, `<phase>.<place>.json`. A gate run writes it (`pytest phases/phase1
--evidence DIR`): to build/evidence/ for the machine at hand, to phases/records/ for what is committed. Its keys:

    schema       2, raised when a key changes its meaning
    phase        "phase1"
    place        "host", or a GPU's architecture as "sm_90"
    device       for people: "host" or the GPU's name; `driver` beside it where there is one
    versions     of this package, Python, NumPy and h5py
    created      date of the run, as 2026-01-31
    digests      of what the run depends on: kernels, contract, oracle, bundles (name -> sha256)
    counts       tests passed, failed, skipped
    kernels      names of the kernels proved
    covered      [kernel, bundle] pairs that were found token-exact
    worst        {kernel: {figure: value}}: largest errors, smallest margin ratios
    tests        one record a test: id, outcome, and the figures it gave

Words: `proven` - a complete run passed for the present digests. `stale` - it passed for others. `failing` - a test
failed for the present digests. `unproven` - no run, or one that skipped or left out something.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtree_engine import bundle as bundles
from kdtree_engine.errors import KdtreeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SCHEMA = 2
LOCAL = Path("build/evidence")
RECORDS = Path("phases/records")
_KEYS = ("phase", "place", "device", "created", "digests", "counts", "kernels", "covered", "worst", "tests")
# Places that the status table always shows; others appear with their evidence.
TARGETS = ("host", "sm_90", "sm_120")
# Folders and files under kernels/ that a phase's kernels are made of. The host runtime counts for the host only.
_KERNEL_SOURCES = {
    "phase0": ("common", "include", "conformance", "probe"),
    "phase1": (
        "common",
        "include",
        "verify_attn/geometry.cuh",
        "verify_attn/verify_attn.cu",
        "verify_attn/verify_attn.cuh",
        "verify_attn/verify_attn_flash.cu",
        "capi.cu",
    ),
    "phase2": (
        "common",
        "include",
        "verify_attn/geometry.cuh",
        "verify_attn/verify_attn_flash_paged.cu",
        "verify_attn/verify_attn_paged.cuh",
        "merge_partials",
        "tree_build",
        "tree_accept",
        "kv_compact",
        "capi.cu",
    ),
}
# It integrates what phase 2 proves.
_KERNEL_SOURCES["phase3"] = _KERNEL_SOURCES["phase2"]
# Where bundles without weights lie, and how their names begin in evidence.
WEIGHTLESS = "weightless/"
# Phases that prove something else than kernels on bundles.
_WITHOUT_KERNELS = ("phase0", "phase3")
# Folders of the package that a phase proves besides its kernels.
_CONTRACT_SOURCES = {
    "phase0": ("ops",),
    "phase1": ("ops",),
    "phase2": ("ops", "decode"),
    "phase3": ("ops", "sglang_backend"),
}
_CPP = {".cu", ".cuh", ".h", ".cpp", ".flags"}


@dataclass(frozen=True)
class Status:
    """The state of a phase at a place, as the table and `--json` show it."""

    phase: str
    place: str
    word: str  # proven, stale, failing or unproven
    why: str
    created: str | None = None
    device: str | None = None
    passed: int = 0
    worst_row_rel_l2: float | None = None
    min_margin_ratio: float | None = None


def checkout(start: Path | None = None) -> Path:
    """The checkout that holds `start` (default: the working directory); KdtreeError outside of one."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "phases").is_dir() and (folder / "kernels" / "capi.cu").is_file():
            return folder
    raise KdtreeError(f"{here} is not in a kdtree-engine checkout; change into one, evidence is about its sources")


def strip_cpp(source: str) -> str:
    """C++ without comments and with single spaces, so that neither changes a digest. Strings stay as they are."""
    token = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
    kept = token.sub(lambda match: " " if match[0].startswith("/") else match[0], source)
    return " ".join(kept.split())


def strip_python(source: str) -> str:
    """A Python module's meaning as text: no comments, docstrings or layout, and the same from every Python version."""
    return _canonical(ast.parse(source))


def _canonical(node: object) -> str:
    # Not ast.dump: what it prints for fields that are empty differs between Python versions.
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    return f"{type(node).__name__}({','.join(f'{name}={_canonical(value)}' for name, value in fields.items())})"


def _source(path: Path) -> str:
    text = path.read_text()
    return strip_python(text) if path.suffix == ".py" else strip_cpp(text)


def _digest(root: Path, paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(f"{path.relative_to(root).as_posix()}\0{_source(path)}\0".encode())
    return total.hexdigest()


def _sources(folder: Path, suffixes: set[str]) -> list[Path]:
    if folder.is_file():
        return [folder]
    return [path for path in folder.rglob("*") if path.suffix in suffixes]


def digests(root: Path, phase: str, place: str) -> dict[str, Any]:
    """Digests of what a phase's evidence depends on, in the sources under `root`.

    Comments, white space and formatting do not count, so that editing them leaves a GPU's record valid.
    """
    kernels = root / "kernels"
    packages = [root / "src/kdtree_engine" / name for name in _CONTRACT_SOURCES[phase]]
    names = [*_KERNEL_SOURCES[phase], *(["host"] if place == "host" else [])]
    weightless = bundles.find(root / "fixtures" / WEIGHTLESS)
    return {
        "kernels": _digest(root, [path for name in names for path in _sources(kernels / name, _CPP)]),
        "contract": _digest(root, [path for folder in packages for path in _sources(folder, {".py"})]),
        "oracle": _digest(root, _sources(root / "oracle", {".py"})),
        "bundles": {path.stem: bundles.digest(path) for path in bundles.find(root / "fixtures/bundles")}
        | ({f"{WEIGHTLESS}{path.stem}": bundles.digest(path) for path in weightless} if phase == "phase2" else {}),
    }


def phases() -> tuple[str, ...]:
    """The phases that have a gate."""
    return tuple(_KERNEL_SOURCES)


def read(path: Path) -> dict[str, Any]:
    """One evidence file; KdtreeError when it is none or of a newer schema."""
    try:
        evidence = json.loads(path.read_text())
        schema = evidence["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KdtreeError(f"{path.name}: not an evidence file ({error}); run the gate again") from error
    if schema != SCHEMA:
        raise KdtreeError(f"{path.name}: schema {schema}, expected {SCHEMA}; run the gate again")
    if missing := [key for key in _KEYS if key not in evidence]:
        raise KdtreeError(f"{path.name}: no {missing[0]} in it; run the gate again")
    return dict(evidence)


def _changed(evidence: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Names of the digests that differ from the present ones."""
    recorded = evidence["digests"]
    names = [name for name in ("kernels", "contract", "oracle") if recorded[name] != present[name]]
    old, new = recorded["bundles"], present["bundles"]
    names += [f"bundle {name}" for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    return names


def judge(evidence: dict[str, Any], present: dict[str, Any]) -> tuple[str, str]:
    """The word for one piece of evidence, and why."""
    counts = evidence["counts"]
    if changed := _changed(evidence, present):
        return "stale", f"changed since: {', '.join(changed)}"
    if counts["failed"]:
        return "failing", f"{counts['failed']} of {sum(counts.values())} tests fail"
    if counts["skipped"]:
        return "unproven", f"{counts['skipped']} tests were skipped"
    if not counts["passed"]:
        return "unproven", "the gate ran nothing"
    if evidence["phase"] not in _WITHOUT_KERNELS:
        if not present["bundles"]:
            return "unproven", "there is no bundle"
        covered = {tuple(pair) for pair in evidence["covered"]}
        # No round follows from a bundle without weights: it asks only those that other bundles give figures of.
        wanted = {
            (kernel, name)
            for name in present["bundles"]
            for kernel in evidence["worst" if name.startswith(WEIGHTLESS) else "kernels"]
        }
        if missing := sorted(wanted - covered):
            return "unproven", f"{len(missing)} kernel-bundle pairs not covered, the first is {' x '.join(missing[0])}"
        if not wanted:
            return "unproven", "the gate knew no kernel"
    return "proven", f"{counts['passed']} tests"


def statuses(root: Path) -> list[Status]:
    """The state of every phase at every place, from local evidence and committed records; `_RANK` says which counts."""
    found: dict[tuple[str, str], list[Path]] = {(phase, place): [] for phase in phases() for place in TARGETS}
    for path in [*sorted((root / LOCAL).glob("*.json")), *sorted((root / RECORDS).glob("*.json"))]:
        phase, _, place = path.stem.partition(".")
        if phase in _KERNEL_SOURCES:
            found.setdefault((phase, place), []).append(path)
    rows = []
    for (phase, place), paths in sorted(found.items()):
        present = digests(root, phase, place)
        candidates = [_status(phase, place, path, present) for path in paths]
        if not candidates:
            candidates = [Status(phase, place, "unproven", "no run is recorded")]
        rows.append(min(candidates, key=lambda row: _RANK.index(row.word)))
    return rows


# A failure of the very sources at hand outranks a record of their success, that outranks any run of other sources.
_RANK = ("failing", "proven", "stale", "unproven")


def _status(phase: str, place: str, path: Path, present: dict[str, Any]) -> Status:
    evidence = read(path)
    word, why = judge(evidence, present)
    worst = evidence["worst"].values()
    errors = [row["out_row_rel_l2"] for row in worst if "out_row_rel_l2" in row]
    # Records from before there was one per node have only its lower bound.
    ratios = [row.get("node_margin_ratio", row.get("margin_ratio")) for row in worst]
    return Status(
        phase,
        place,
        word,
        why,
        evidence["created"],
        evidence["device"],
        evidence["counts"]["passed"],
        max(errors, default=None),
        min((ratio for ratio in ratios if ratio is not None), default=None),
    )


def unmet(rows: Sequence[Status], requirements: Sequence[str]) -> list[str]:
    """Which of the requirements, as "phase1@host", are not proven; KdtreeError for one that cannot be parsed."""
    words = {f"{row.phase}@{row.place}": row.word for row in rows}
    for requirement in requirements:
        phase, at, place = requirement.partition("@")
        if not (at and place) or phase not in _KERNEL_SOURCES:
            raise KdtreeError(f"--require: got {requirement!r}, expected PHASE@PLACE as phase1@host")
    return [requirement for requirement in requirements if words.get(requirement) != "proven"]


def as_json(rows: Sequence[Status]) -> dict[str, Any]:
    """The status table as `status --json` prints it; `schema` is raised when a key changes its meaning."""
    return {"schema": 1, "statuses": [asdict(row) for row in rows]}
