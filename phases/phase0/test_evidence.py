"""Evidence: what digests see, which word a run earns, which run counts; and that half a gate proves nothing."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kdtree_engine import KdtreeError, evidence, library
from phases.conftest import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what evidence looks at, to be changed."""
    root = tmp_path / "checkout"
    for folder in ("kernels", "oracle", "src/kdtree_engine/ops", "fixtures/bundles"):
        shutil.copytree(ROOT / folder, root / folder)
    (root / evidence.RECORDS).mkdir(parents=True)
    (root / evidence.LOCAL).mkdir(parents=True)
    return root


def append(name: str, text: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / name
        path.write_text(path.read_text() + text)

    return change


def record(root: Path, **changes: Any) -> dict[str, Any]:
    """Evidence of a complete run for the sources under `root`."""
    digests = evidence.digests(root, "phase1", changes.get("place", "host"))
    kernels = ["verify_attn", "verify_attn_flash"]
    return {
        "schema": evidence.SCHEMA,
        "phase": "phase1",
        "place": "host",
        "device": "host",
        "driver": None,
        "created": "2026-01-31",
        "digests": digests,
        "counts": {"passed": 9, "failed": 0, "skipped": 0},
        "kernels": kernels,
        "covered": [[kernel, bundle] for kernel in kernels for bundle in digests["bundles"]],
        "worst": {"verify_attn": {"out_row_rel_l2": 2e-7, "margin_ratio": 40.0}},
        "tests": [],
        **changes,
    }


def place(root: Path, found: dict[str, Any], folder: Path = evidence.LOCAL) -> None:
    (root / folder / f"{found['phase']}.{found['place']}.json").write_text(json.dumps(found))


def status(root: Path, where: str = "host") -> evidence.Status:
    (row,) = [row for row in evidence.statuses(root) if (row.phase, row.place) == ("phase1", where)]
    return row


SAME = [
    append("kernels/verify_attn/verify_attn_flash.cu", "\n// a comment\n/* and\n another */\n"),
    append("oracle/verify_attn.py", "\n\n# a comment\n"),
    append("kernels/resources.toml", "\n# not a source\n"),
    append("kernels/conformance/conformance.cu", "int other_phase;"),
    append("kernels/verify_attn/verify_attn_flash_paged.cu", "int other_phase;"),
]
CHANGES = [
    (append("kernels/verify_attn/verify_attn_flash.cu", "int changed;"), "kernels"),
    (append("kernels/common/intrinsics.cuh", "int changed;"), "kernels"),
    (append("kernels/capi.cu", 'const char* text = "// not a comment";'), "kernels"),
    (append("kernels/host/simt.cpp", "int changed;"), "kernels"),
    (append("kernels/host/plain.flags", "-O3\n"), "kernels"),
    (append("oracle/verify_attn.py", "\nchanged = 1\n"), "oracle"),
    (append("src/kdtree_engine/ops/verify_attn.py", "\nchanged = 1\n"), "contract"),
    (lambda root: next((root / "fixtures/bundles").glob("*.h5")).unlink(), "bundle "),
    (lambda root: (root / "fixtures/bundles/new.h5").write_bytes(b"\x89HDF\r\n\x1a\n"), "bundle new"),
]


@pytest.mark.parametrize("change", SAME)
def test_comments_and_other_phases_leave_a_proof_standing(change: Callable[[Path], None], checkout: Path) -> None:
    place(checkout, record(checkout))
    change(checkout)
    assert status(checkout).word == "proven"


@pytest.mark.parametrize(("change", "names"), CHANGES)
def test_a_change_makes_stale_and_is_named(change: Callable[[Path], None], names: str, checkout: Path) -> None:
    place(checkout, record(checkout))
    change(checkout)
    row = status(checkout)
    assert row.word == "stale"
    assert f"changed since: {names}" in row.why


def test_every_kernel_source_counts_for_a_phase(checkout: Path) -> None:
    before = {phase: evidence.digests(checkout, phase, "sm_90")["kernels"] for phase in evidence.phases()}
    for folder in {info.op.removesuffix("_paged") for info in library("host").kernels}:
        for path in sorted((checkout / "kernels" / folder).iterdir()):
            source = path.read_text()
            path.write_text(source + "int changed;")
            changed = [name for name in before if evidence.digests(checkout, name, "sm_90")["kernels"] != before[name]]
            assert changed, f"{path.name} is no part of any phase's digest"
            path.write_text(source)


def test_the_host_runtime_is_no_part_of_a_gpus_proof(checkout: Path) -> None:
    place(checkout, record(checkout, place="sm_90"), evidence.RECORDS)
    append("kernels/host/simt.cpp", "int changed;")(checkout)
    assert status(checkout, "sm_90").word == "proven"


def counts(passed: int = 9, failed: int = 0, skipped: int = 0) -> dict[str, Any]:
    return {"counts": {"passed": passed, "failed": failed, "skipped": skipped}}


@pytest.mark.parametrize(
    ("changes", "word", "why"),
    [
        ({}, "proven", "9 tests"),
        (counts(failed=1), "failing", "1 of 10 tests fail"),
        (counts(skipped=2), "unproven", "2 tests were skipped"),
        (counts(passed=0), "unproven", "ran nothing"),
        ({"covered": []}, "unproven", "not covered"),
        ({"kernels": [], "covered": []}, "unproven", "knew no kernel"),
    ],
)
def test_words(changes: dict[str, Any], word: str, why: str, checkout: Path) -> None:
    place(checkout, record(checkout, **changes))
    row = status(checkout)
    assert row.word == word
    assert why in row.why


def test_one_pair_left_out_is_named(checkout: Path) -> None:
    found = record(checkout)
    kernel, bundle = found["covered"].pop()
    place(checkout, found)
    row = status(checkout)
    assert row.word == "unproven"
    assert f"{kernel} x {bundle}" in row.why


def test_without_bundles_nothing_is_proven(checkout: Path) -> None:
    shutil.rmtree(checkout / "fixtures/bundles")
    place(checkout, record(checkout))
    assert status(checkout).word == "unproven"


def test_without_evidence_all_targets_are_shown(checkout: Path) -> None:
    rows = evidence.statuses(checkout)
    assert {(row.phase, row.place) for row in rows} >= {(p, t) for p in evidence.phases() for t in evidence.TARGETS}
    assert {row.word for row in rows} == {"unproven"}


@pytest.mark.parametrize(
    ("local", "committed", "word"),
    [
        ({}, "stale", "proven"),
        (counts(skipped=1), {}, "proven"),
        (counts(failed=1), {}, "failing"),
        ("stale", {}, "proven"),
        (counts(skipped=1), "stale", "stale"),
    ],
)
def test_which_run_counts(local: Any, committed: Any, word: str, checkout: Path) -> None:
    for state, folder in ((local, evidence.LOCAL), (committed, evidence.RECORDS)):
        found = record(checkout, **({} if state == "stale" else state))
        if state == "stale":
            found["digests"] = copy.deepcopy(found["digests"]) | {"oracle": "0" * 64}
        place(checkout, found, folder)
    assert status(checkout).word == word


def test_requirements(checkout: Path) -> None:
    place(checkout, record(checkout))
    rows = evidence.statuses(checkout)
    assert evidence.unmet(rows, ["phase1@host", "phase1@sm_120", "phase0@host"]) == ["phase1@sm_120", "phase0@host"]
    for wrong in ("phase1", "phase9@host", "@host"):
        with pytest.raises(KdtreeError, match="expected PHASE@PLACE"):
            evidence.unmet(rows, [wrong])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 2}'])
def test_damaged_evidence_is_one_line(text: str, checkout: Path) -> None:
    (checkout / evidence.LOCAL / "phase1.host.json").write_text(text)
    with pytest.raises(KdtreeError, match=r"phase1\.host\.json.*run the gate again") as raised:
        evidence.statuses(checkout)
    assert "\n" not in str(raised.value)


def test_committed_records() -> None:
    """Each names its own phase and place, and comes from a run without a failure or a skip."""
    for path in (ROOT / evidence.RECORDS).glob("*.json"):
        found = evidence.read(path)
        assert path.stem == f"{found['phase']}.{found['place']}"
        assert found["counts"]["failed"] == found["counts"]["skipped"] == 0 < found["counts"]["passed"], path.name


def run_gate(root: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        "PYTHONPATH": str(ROOT / "src"),
        "KDTREE_ENGINE_LIBRARY": str(library("host").path),
    }
    command = [sys.executable, "-m", "pytest", *arguments, "--evidence", str(folder)]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["phases/phase1", "-k", "x"],
        ["phases/phase1", "--deselect", "y"],
        ["phases/phase1", "--lf"],
        ["phases/phase1", "phases/phase0"],
        ["phases/phase1/test_parity.py"],
        ["phases"],
    ],
)
def test_a_gate_takes_no_selection(arguments: list[str], tmp_path: Path) -> None:
    result = run_gate(ROOT, tmp_path, *arguments)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "needs one whole gate" in result.stderr
    assert not list(tmp_path.iterdir())


def write_gate(root: Path, **files: str) -> None:
    """A phase 1 of some test files under the real conftest."""
    phases = root / "phases"
    (phases / "phase1").mkdir()
    for name in ("__init__.py", "conftest.py", "paged.py", "places.py"):
        shutil.copy(ROOT / "phases" / name, phases)
    shutil.copy(ROOT / "pyproject.toml", root)
    for name, text in files.items():
        (phases / "phase1" / f"{name}.py").write_text(text)


NOTHING = "x = 1"
SKIPS = "import pytest\n@pytest.mark.skip\ndef test_one(): ...\ndef test_two(): ..."
PASSES = "def test_one(): ..."
FAILS = "def test_one(evidence):\n    evidence(figure=1)\n    assert False"


@pytest.mark.parametrize(
    ("gate", "line"),
    [
        (NOTHING, "phase1: no evidence"),
        (SKIPS, "phase1 @ host: unproven (1 tests were skipped)"),
        (PASSES, "kernel-bundle pairs not covered, the first is verify_attn x "),
        (FAILS, "phase1 @ host: failing (1 of 1 tests fail)"),
    ],
)
def test_half_a_gate_fails_and_says_so(gate: str, line: str, checkout: Path, tmp_path: Path) -> None:
    """The real conftest and a gate that runs nothing, skips, or leaves pairs out: not one of them ends with 0."""
    write_gate(checkout, test_gate=gate)
    workers = "2" if gate == FAILS else "0"
    result = run_gate(checkout, tmp_path / "evidence", "phases/phase1", "-n", workers)
    assert line in result.stdout, result.stdout + result.stderr
    assert result.returncode in {pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}
    if gate == FAILS:
        found = evidence.read(tmp_path / "evidence" / "phase1.host.json")
        assert found["tests"] == [{"id": "test_gate.py::test_one", "outcome": "failed", "figures": [{"figure": 1}]}]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_file_that_cannot_be_collected_is_a_failure(workers: str, checkout: Path, tmp_path: Path) -> None:
    """What is in it has not run, however many others pass; workers go on without it, a single process stops."""
    write_gate(checkout, test_gate=PASSES, test_broken="raise ValueError")
    result = run_gate(checkout, tmp_path / "evidence", "phases/phase1", "-n", workers)
    assert result.returncode in {pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED}
    verdict = "phase1: no evidence" if workers == "0" else "phase1 @ host: failing (1 of 2 tests fail)"
    assert verdict in result.stdout, result.stdout + result.stderr
