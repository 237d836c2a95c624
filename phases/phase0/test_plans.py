"""The headers of plans/ against the code: what a plan names exists, and its budgets are the constants in force."""

from __future__ import annotations

import ast
import re
import tomllib
from typing import TYPE_CHECKING, Any

import pytest

from kdtree_engine import evidence, library, toolchain
from kdtree_engine.ops import verify_attn, verify_attn_paged
from phases.bundles import MAX_FIXTURE_BYTES
from phases.conftest import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PLANS = sorted((ROOT / "plans").glob("[0-9]*.md"))
KEYS = {"id": int, "title": str, "status": str, "phases": list, "gates": list, "kernels": list, "budgets": dict}
STATUSES = {"draft", "active", "done", "superseded"}
BUDGETS = {
    "max_shared_bytes": toolchain.MAX_SHARED_BYTES,
    "spill_instructions": 0,
    "out_row_rel_l2": verify_attn.OUT_ROW_REL_L2,
    "lse_abs": verify_attn.LSE_ABS,
    "paged_out_rel_l2": verify_attn_paged.OUT_REL_L2,
    "paged_out_row_rel_l2": verify_attn_paged.OUT_ROW_REL_L2,
    "paged_lse_abs": verify_attn_paged.LSE_ABS,
    "fixture_bytes": MAX_FIXTURE_BYTES,
}


def header(path: Path) -> dict[str, Any]:
    match = re.match(r"\+\+\+\n(.*?)\n\+\+\+\n", path.read_text(), re.DOTALL)
    assert match, f"{path.name} does not open with a header between lines of +++"
    return tomllib.loads(match[1])


def sessions() -> set[str]:
    """Names of the nox sessions."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("session" in ast.unparse(mark) for mark in node.decorator_list)
    }


def test_there_are_plans() -> None:
    assert [path.name[:4] for path in PLANS] == [f"{number:04}" for number in range(1, len(PLANS) + 1)]
    assert len(PLANS) >= 2


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem[:4])
def test_header(path: Path) -> None:
    found = header(path)
    assert found.keys() == KEYS.keys()
    for key, kind in KEYS.items():
        assert type(found[key]) is kind, key
    assert re.fullmatch(r"\d{4}(-[a-z0-9]+)+", path.stem)
    assert found["id"] == int(path.name[:4])
    assert found["title"]
    assert found["status"] in STATUSES


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem[:4])
def test_what_it_names_exists(path: Path) -> None:
    found = header(path)
    assert set(found["phases"]) <= sessions() & set(evidence.phases())
    assert [f"phases/{phase}" for phase in found["phases"]] == found["gates"]
    for gate in found["gates"]:
        assert list((ROOT / gate).glob("test_*.py")), gate
    assert set(found["kernels"]) <= {info.name for info in library("host").kernels}
    for name, limit in found["budgets"].items():
        assert limit == BUDGETS[name], name


def test_every_kernel_has_a_plan() -> None:
    planned = {kernel for path in PLANS for kernel in header(path)["kernels"]}
    assert planned == {info.name for info in library("host").kernels}


def test_index_lists_every_plan() -> None:
    text = (ROOT / "plans" / "README.md").read_text()
    for path in PLANS:
        assert f"]({path.name})" in text
    for key in KEYS:
        assert f"| `{key}` |" in text
