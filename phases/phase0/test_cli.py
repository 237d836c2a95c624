"""The command line: what it prints, as a table and as JSON, and its exit status: 0 yes, 1 no, 2 misuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kdtree_engine import bundle, evidence, library
from kdtree_engine.cli import main
from phases.conftest import BUNDLES, ROOT


@pytest.fixture(autouse=True)
def _in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels"]) == 0
    text = capsys.readouterr().out
    for info in library("host").kernels:
        assert info.name in text
    found = as_json(capsys, "kernels")
    assert {one["place"] for one in found["libraries"]} == {"host", "cuda"}
    assert found["libraries"][0]["kernels"][0]["name"] == library("host").kernels[0].name


def test_kernels_without_a_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KDTREE_ENGINE_LIBRARY", raising=False)
    monkeypatch.setenv("KDTREE_ENGINE_LIBRARY_DIR", str(tmp_path))
    assert main(["kernels"]) == 1
    assert "nox -s build" in capsys.readouterr().err


def test_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    text = capsys.readouterr().out
    rows = as_json(capsys, "status")["statuses"]
    assert {(row["phase"], row["place"]) for row in rows} >= {
        (p, t) for p in evidence.phases() for t in evidence.TARGETS
    }
    for row in rows:
        assert row["word"] in {"proven", "stale", "failing", "unproven"}
        assert row["place"] in text


def test_status_requirement_not_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--require", "phase1@sm_nowhere"]) == 1
    captured = capsys.readouterr()
    assert "phase1 is not proven on sm_nowhere; run `nox -s phase1` there" in captured.err
    assert main(["status", "--json", "--require", "phase1@sm_nowhere"]) == 1
    assert json.loads(capsys.readouterr().out)["unmet"] == ["phase1@sm_nowhere"]


def test_status_outside_a_checkout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 1
    assert "not in a kdtree-engine checkout" in capsys.readouterr().err


def test_bundle_show(bundle_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "show", str(bundle_path)]) == 0
    text = capsys.readouterr().out
    assert bundle_path.stem in text
    assert "request/kv_indices" in text
    assert as_json(capsys, "bundle", "show", str(bundle_path))["name"] == bundle_path.stem


def test_bundle_show_refuses_a_damaged_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.h5"
    data = bundle.find(BUNDLES)[0].read_bytes()
    damaged.write_bytes(data[: len(data) // 2])
    assert main(["bundle", "show", str(damaged)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["frobnicate"], ["bundle"], ["bundle", "show"], ["status", "--require", "x"], ["status", "more"]]
)
def test_misuse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage: kdtree-engine" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "kernels", "status", "bundle", "bundle show", "capture", "toolchain"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([*command.split(), "--help"])
    assert raised.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["status --json", "kernels --json", "kernels"])
def test_output_that_cannot_be_written_is_no_traceback(command: str, unbuffered: str) -> None:
    """Whether the answer fails while it is written or, shorter than the buffer, only when it is flushed."""
    words = [sys.executable, "-m", "kdtree_engine", *command.split()]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr == "kdtree-engine: [Errno 28] No space left on device\n"
