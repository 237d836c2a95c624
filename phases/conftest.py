"""What all gates share. A gate test asks for these by name:

    place         the `phases.places.Place` of --place, host (default) or cuda
    kernel_name   each kernel of the library that the test's own phase proves; of some ops if the test's module has OPS
    bundle        each bundle under fixtures/bundles; bundle_path is its file
    evidence      evidence(kernel=..., bundle=..., **figures): what this test found out, kept with its outcome

`pytest phases/phase1 --evidence DIR` runs the whole gate and writes DIR/phase1.<place>.json (kdtree_engine.evidence has
the format); it refuses a selection, since a part proves nothing. With --place cuda it is the gate on a GPU.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest

import kdtree_engine
from kdtree_engine import KernelError
from kdtree_engine import bundle as bundles
from kdtree_engine import evidence as evidences
from phases.places import Place

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
BUNDLES = ROOT / "fixtures" / "bundles"
# Files that make sense at one place only. They are left out elsewhere, not skipped.
ONLY_AT = {"cuda": "cuda", "host_variants": "host", "injected_bugs": "host"}  # by how a file's name ends


@functools.cache
def _place(kind: str) -> Place:
    place = Place("cuda" if kind == "cuda" else "host")
    if kind == "cuda":
        import torch

        # Workers share the GPUs evenly.
        worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "0")) or 0)
        torch.cuda.set_device(worker % torch.cuda.device_count())
    return place


_read = functools.cache(bundles.read)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gates")
    group.addoption("--place", choices=["host", "cuda"], default="host", help="where kernels run")
    group.addoption("--evidence", type=Path, metavar="DIR", help="write the gate's evidence there")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--evidence")
    if folder is None or hasattr(config, "workerinput"):
        return
    option = config.option
    selects = option.keyword or option.markexpr or option.deselect or getattr(option, "lf", False)
    gate = Path(config.args[0]).resolve() if len(config.args) == 1 else None
    if selects or gate is None or gate.parent != ROOT / "phases" or gate.name not in evidences.phases():
        raise pytest.UsageError("--evidence: needs one whole gate as phases/phase1, without -k, -m, --lf or --deselect")
    config.pluginmanager.register(Recorder(gate.name, config.getoption("--place"), folder), "recorder")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.name.startswith("test_"):
        return None
    # Phase 0 is about the machine that builds; on a GPU only what runs there counts.
    usual = "host" if collection_path.parent.name == "phase0" else None
    wanted = next((kind for ending, kind in ONLY_AT.items() if collection_path.stem.endswith(f"_{ending}")), usual)
    return True if wanted not in (None, config.getoption("--place")) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernel_name" in metafunc.fixturenames:
        phase = int(Path(metafunc.definition.path).parent.name.removeprefix("phase"))
        try:
            infos = _place(metafunc.config.getoption("--place")).kernels(phase)
        except KernelError as error:
            raise pytest.UsageError(str(error)) from error
        ops = getattr(metafunc.module, "OPS", {info.op for info in infos})
        metafunc.parametrize("kernel_name", [info.name for info in infos if info.op in ops])
    if "bundle_path" in metafunc.fixturenames:
        paths = bundles.find(BUNDLES)
        metafunc.parametrize("bundle_path", paths, ids=[path.stem for path in paths])


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest) -> Place:
    return _place(request.config.getoption("--place"))


@pytest.fixture
def bundle(bundle_path: Path) -> bundles.Bundle:
    return _read(bundle_path)


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Callable[..., None]:
    def add(**figures: Any) -> None:
        request.node.user_properties.append(("evidence", figures))

    return add


def pytest_report_header(config: pytest.Config) -> list[str]:
    try:
        place = _place(config.getoption("--place"))
    except KernelError as error:
        return [f"kernels: {error}"]
    names = ", ".join(info.name for info in place.library.kernels)
    return [
        f"place: {place.name} ({place.device})",
        f"versions: {', '.join(f'{name} {version}' for name, version in _versions().items())}",
        f"kernels: {names} in {place.library.path.name} [{' '.join(place.library.archs)}]",
    ]


def _versions() -> dict[str, str]:
    """Of what a figure may depend on besides the sources."""
    return {
        "kdtree-engine": kdtree_engine.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "h5py": h5py.__version__,
    }


class Recorder:
    """Collects the outcomes and figures of a gate's tests and writes its evidence file."""

    def __init__(self, phase: str, kind: str, folder: Path) -> None:
        self._phase, self._kind, self._folder = phase, kind, folder
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.removeprefix(f"phases/{self._phase}/")
        test = self._tests.setdefault(name, {"id": name, "outcome": "passed", "figures": []})
        # A test passes when its setup, call and teardown all do.
        if report.failed or (report.skipped and test["outcome"] == "passed"):
            test["outcome"] = report.outcome
        if report.when == "call":
            test["figures"] += [figures for key, figures in report.user_properties if key == "evidence"]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected is a test that failed: what it holds has not run."""
        if report.failed:
            name = report.nodeid.removeprefix(f"phases/{self._phase}/")
            self._tests[name] = {"id": name, "outcome": "failed", "figures": []}

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return  # interrupted, or nothing collected: no evidence of anything
        place = _place(self._kind)
        outcomes = [test["outcome"] for test in self._tests.values()]
        counts = {word: outcomes.count(word) for word in ("passed", "failed", "skipped")}
        record: dict[str, Any] = {
            "schema": evidences.SCHEMA,
            "phase": self._phase,
            "place": place.name,
            "device": place.device,
            "driver": place.driver,
            "versions": _versions(),
            "created": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "digests": evidences.digests(ROOT, self._phase, place.name),
            "counts": counts,
            "kernels": [info.name for info in place.kernels(int(self._phase.removeprefix("phase")))],
            "covered": self._covered(),
            "worst": self._worst(),
            "tests": sorted(self._tests.values(), key=lambda test: str(test["id"])),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._phase}.{place.name}.json"
        bundles.replace_file(path, (json.dumps(record, indent=1) + "\n").encode())
        word, why = evidences.judge(record, record["digests"])
        self._line = f"{self._phase} @ {place.name}: {word} ({why})"
        if word != "proven" and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for verdict in self._verdicts():
            ratio, node_ratio = (
                "inf" if verdict[name] is None else f"{verdict[name]:.3g}"
                for name in ("margin_ratio", "node_margin_ratio")
            )
            layout = f" in {verdict['layout']}" if verdict["layout"] else ""
            level = "token-exact" if verdict["token_exact"] else verdict["level"]
            terminalreporter.write_line(
                f"{verdict['bundle']} x {verdict['kernel']}{layout}: {level}, "
                f"nodes {verdict['nodes']}, undecided {verdict['undecided']}, D {verdict['budget']:.3g}, "
                f"max d {verdict['max_logit_error']:.3g}, margin ratio {ratio}, node margin ratio {node_ratio}, "
                f"row relL2 {verdict['out_row_rel_l2']:.3g}, lse error {verdict['lse_error']:.3g}"
            )
        terminalreporter.write_line(getattr(self, "_line", f"{self._phase}: no evidence"))

    def _verdicts(self) -> list[dict[str, Any]]:
        figures = [figures for test in self._tests.values() for figures in test["figures"]]
        return [{"layout": "", **entry, **entry["verdict"]} for entry in figures if "verdict" in entry]

    def _covered(self) -> list[list[str]]:
        """An attention kernel covers a bundle by its verdict, or by T0 where there are no weights; one without rounding
        by giving what the bundle says."""
        pairs = {(verdict["kernel"], verdict["bundle"]) for verdict in self._verdicts() if verdict["token_exact"]}
        for test in self._tests.values():
            pairs |= {
                (entry["kernel"], entry["bundle"]) for entry in test["figures"] if entry.get("equal") or entry.get("t0")
            }
        return sorted(map(list, pairs))

    def _worst(self) -> dict[str, dict[str, float]]:
        worst: dict[str, dict[str, float]] = {}
        for verdict in self._verdicts():
            row = worst.setdefault(verdict["kernel"], {})
            for figure in ("out_row_rel_l2", "out_max_abs", "lse_error", "max_logit_error"):
                row[figure] = max(row.get(figure, 0.0), verdict[figure])
            for figure in ("margin_ratio", "node_margin_ratio"):
                if verdict[figure] is not None:
                    row[figure] = min(row.get(figure, verdict[figure]), verdict[figure])
        return worst
