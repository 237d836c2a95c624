"""Before SGLang is imported: Triton interprets on the host, and what an import asks for and nobody calls stands in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kdtree_engine.sglang_backend import parity
from phases.phase3 import engine

if TYPE_CHECKING:
    from phases.places import Place


def pytest_configure(config: pytest.Config) -> None:
    # SGLang and what it imports warn of much; of ours no warning passes, as elsewhere.
    config.addinivalue_line("filterwarnings", "ignore")
    config.addinivalue_line("filterwarnings", "error:::kdtree_engine")
    if config.getoption("--place") == "host":
        os.environ["TRITON_INTERPRET"] = "1"
    from phases.phase3 import stand_ins

    stand_ins.install()


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> parity.Parity:
    """A process's state of the test's own."""
    made = parity.Parity()
    monkeypatch.setattr(parity, "_process", made)
    return made


@pytest.fixture(scope="session")
def plain(place: Place, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The texts of plain decoding with SGLang's kernels."""
    return list(engine.run(place, tmp_path_factory.mktemp("plain"), {})["tokens"])
