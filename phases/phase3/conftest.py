"""Before SGLang is imported: Triton interprets on the host, and what an import asks for and nobody calls stands in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_configure(config: pytest.Config) -> None:
    # SGLang and what it imports warn of much; of ours no warning passes, as elsewhere.
    config.addinivalue_line("filterwarnings", "ignore")
    config.addinivalue_line("filterwarnings", "error:::kdtree_engine")
    if config.getoption("--place") == "host":
        os.environ["TRITON_INTERPRET"] = "1"
    from phases.phase3 import stand_ins

    stand_ins.install()
