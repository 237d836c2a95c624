"""Modes, log and counters of the serving backend without SGLang: what they are told, they say and do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kdtree_engine.cli import main
from kdtree_engine.errors import KdtreeError
from kdtree_engine.sglang_backend import parity, plugin
from kdtree_engine.sglang_backend.parity import ROW_REL_L2, Budget, Log, Parity

if TYPE_CHECKING:
    from pathlib import Path

GOOD, BAD = ROW_REL_L2 / 2, ROW_REL_L2 * 2


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.5.11", False),
        ("0.5.12.post1", True),
        ("0.5.16", True),
        ("0.5.23", True),
        ("0.5.24", False),
        ("0.6.0", False),
        ("0.4.9", False),
        ("1.0", False),
    ],
)
def test_versions_of_sglang(version: str, fits: bool) -> None:
    if fits:
        plugin.check_version(version)
        return
    with pytest.raises(KdtreeError, match=rf"^sglang: got version {version}, expected 0\.5\.12 or later") as raised:
        plugin.check_version(version)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KDTREE_ENGINE_MODE", "on"),
        ("KDTREE_ENGINE_SAMPLE", "often"),
        ("KDTREE_ENGINE_SAMPLE", "1.5"),
        ("KDTREE_ENGINE_SAMPLE", "nan"),
        ("KDTREE_ENGINE_BUDGET", "-1"),
        ("KDTREE_ENGINE_AUTO_CALLS", "0"),
        ("KDTREE_ENGINE_AUTO_CALLS", "-4"),
    ],
)
def test_variables_that_make_no_sense(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(KdtreeError, match=f"^{name}: got '{value}', expected"):
        Parity.from_environment()


def test_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("MODE", "serve"), ("SAMPLE", "0.25"), ("AUTO_CALLS", "7")):
        monkeypatch.setenv(f"KDTREE_ENGINE_{name}", value)
    monkeypatch.setenv("KDTREE_ENGINE_PARITY_LOG", str(tmp_path / "log"))
    state = Parity.from_environment()
    assert (state.mode, state.serving, state.serve_share, state.auto_calls) == ("serve", True, 0.25, 7)
    assert [state.compares() for _ in range(8)] == [False, False, False, True] * 2
    assert json.loads((tmp_path / "log").read_text())["mode"] == "serve"


@pytest.mark.parametrize(("compared", "share"), [(1.0, 1.0), (1.25, 1.0), (2.0, 0.25), (6.0, 0.05), (0.9, 1.0)])
def test_a_budget_limits_what_comparing_costs(compared: float, share: float) -> None:
    """Steps of 1 s take `compared` with a comparison: on average no step may take more than a quarter longer."""
    budget = Budget(0.25)
    state = Parity(budget=budget)
    spent, count = 0.0, 0
    for step in range(2000):
        does = state.compares()
        budget.took(compared if does else 1.0, compared=does)
        if step >= 100:
            spent, count = spent + (compared if does else 1.0), count + does
    assert count / 1900 == pytest.approx(share, abs=0.01)
    assert spent / 1900 <= 1.25 * (1 + 1e-3) or compared <= 1.25


def test_without_a_budget_every_step_may_be_compared() -> None:
    state = Parity()
    assert all(state.compares() for _ in range(100))


def test_a_pause_is_no_cost() -> None:
    budget = Budget(0.25)
    for step in range(64):
        budget.took(1000.0 if step % 20 == 0 else 1.0, compared=step % 2 == 0)
    assert budget.share() == 1.0


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_a_share_of_steps_is_compared(share: float) -> None:
    state = Parity(shadow_share=share)
    assert sum(state.compares() for _ in range(1000)) == pytest.approx(1000 * share, abs=1)
    state.set_mode("off")
    assert not any(state.compares() for _ in range(1000))


def test_auto_waits_for_every_layer() -> None:
    state = Parity(auto_calls=5)
    state.set_mode("auto")
    state.compared(0, 5, GOOD, GOOD, 1.0)
    state.promote(2)
    assert not state.serving
    state.compared(1, 4, GOOD, GOOD, 1.0)
    state.promote(2)
    assert not state.serving
    state.compared(1, 1, GOOD, GOOD, 1.0)
    state.promote(2)
    assert state.serving


@pytest.mark.parametrize("row", [BAD, np.nan, np.inf])
def test_a_breach_ends_serving_and_starts_over(row: float, caplog: pytest.LogCaptureFixture) -> None:
    state = Parity(auto_calls=2)
    state.set_mode("auto")
    state.compared(0, 2, GOOD, GOOD, 1.0)
    state.promote(1)
    assert state.serving
    assert not state.compared(0, 1, GOOD, row, 1.0)
    assert not state.serving
    assert "back to SGLang's kernel" in caplog.text
    state.compared(0, 1, GOOD, GOOD, 1.0)
    state.promote(1)
    assert not state.serving
    state.compared(0, 1, GOOD, GOOD, 1.0)
    state.promote(1)
    assert state.serving


def test_a_breach_in_serve_is_said_and_left_to_people(caplog: pytest.LogCaptureFixture) -> None:
    state = Parity()
    state.set_mode("serve")
    state.compared(3, 1, GOOD, BAD, 1.0)
    assert state.serving
    assert state.counters["breaches"] == 1
    assert "parity broken, layer 3" in caplog.text


def test_a_reason_is_said_once_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    state = Parity()
    for _ in range(5):
        state.fall_back("it is Tuesday")
    assert caplog.text.count("it is Tuesday") == 1
    assert state.counters["fallback: it is Tuesday"] == 5


def test_unknown_mode() -> None:
    with pytest.raises(KdtreeError, match="got 'on', expected one of off, shadow, serve, auto"):
        Parity().set_mode("on")


def test_log_is_put_aside_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "LOG_BYTES", 200)
    path = tmp_path / "parity.jsonl"
    log = Log(path)
    for number in range(40):
        log.write("parity", number=number)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["parity.jsonl", "parity.jsonl.1", "parity.jsonl.2", "parity.jsonl.3"]
    kept = [
        json.loads(line)["number"] for file in [*reversed(files[1:]), path] for line in file.read_text().splitlines()
    ]
    assert kept == list(range(kept[0], 40))
    assert all(file.stat().st_size <= 200 for file in files)


def test_a_log_that_cannot_be_written_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = Log(tmp_path / "missing" / "parity.jsonl")
    log.write("mode")
    log.write("mode")
    assert caplog.text.count("no more is logged") == 1


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "parity.jsonl"
    state = Parity(log=Log(path))
    state.set_mode("shadow")
    state.compared(0, 10, 1e-3, 2e-3, 0.01)
    state.compared(1, 4, 1e-3, 3e-3, 0.02)
    state.compared(0, 5, 2e-3, 1e-3, 0.005)
    state.fall_back("heads")
    return path


def test_command(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", str(written)]) == 0
    text = capsys.readouterr().out
    for word in ("layer", "15", "2.00e-03", "3.00e-03", "mode shadow", "left to SGLang's kernel: heads"):
        assert word in text
    assert main(["parity", str(written), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"]["0"] == {
        "compared": 15, "breaches": 0, "rel_l2": 2e-3, "row_rel_l2": 2e-3, "max_abs": 0.01
    }  # fmt: skip
    assert found["fallbacks"] == {"heads": 1}


def test_command_after_a_breach(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with written.open("a") as file:
        file.write(json.dumps({"time": 1, "event": "parity", "layer": 2, "calls": 1, "within": False,
                               "rel_l2": 1.0, "row_rel_l2": float("nan"), "max_abs": 3.0}) + "\n")  # fmt: skip
        file.write('{"time": 2, "ev')  # killed in the middle of a line
    assert main(["parity", str(written)]) == 1
    assert "NaN" in capsys.readouterr().out


def test_command_refuses_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.write_text("one\ntwo\n")
    for path, words in ((other, "other:1: not a line of a parity log"), (tmp_path / "none", "cannot be read")):
        assert main(["parity", str(path)]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words in error
