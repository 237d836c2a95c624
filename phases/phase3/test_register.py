"""Phase 3: SGLang finds the backend as it finds any plugin."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import pytest
import sglang

from kdtree_engine.errors import KdtreeError
from kdtree_engine.sglang_backend import BACKEND_NAME, register
from phases.conftest import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from phases.places import Place

    Evidence = Callable[..., None]

PROGRAM = """
from phases.phase3 import stand_ins
stand_ins.install()
from kdtree_engine.sglang_backend import register
register()
register()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES
from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy
from kdtree_engine.sglang_backend import KDTreeMLAVerifyBackend
print(resolve_dflash_verify_mask_policy(object.__new__(KDTreeMLAVerifyBackend))[1])
print(ATTENTION_BACKEND_CHOICES.count("kdtree_mla"), ATTENTION_BACKENDS["kdtree_mla"].__module__,
      ATTENTION_BACKENDS["triton"].__module__)
"""


@pytest.mark.parametrize(("replace", "triton"), [(None, "sglang.srt"), ("triton", "kdtree_engine.sglang_backend")])
def test_name_is_a_choice(place: Place, replace: str | None, triton: str, evidence: Evidence) -> None:
    """Once, however often it is registered; and in the place of "triton" when that is asked for."""
    environment = dict(os.environ)
    environment.pop("KDTREE_ENGINE_REPLACE", None)
    if replace is not None:
        environment["KDTREE_ENGINE_REPLACE"] = replace
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    masked, count, ours, theirs = done.stdout.split()[-4:]
    # DFlash's chains need no mask by it.
    assert masked == "False"
    assert count == "1"
    assert ours.startswith("kdtree_engine.sglang_backend")
    assert theirs.startswith(triton)
    evidence(place=place.name)


def test_entry_point_of_the_wheel(evidence: Evidence) -> None:
    """The group that SGLang asks for leads to the function."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = project["entry-points"]["sglang.srt.plugins"]
    assert [EntryPoint(name, value, "").load() for name, value in group.items()] == [register]
    evidence(name=BACKEND_NAME)


def test_a_release_out_of_range_is_one_line(monkeypatch: pytest.MonkeyPatch, evidence: Evidence) -> None:
    monkeypatch.setattr(sglang, "__version__", "0.9.0")
    with pytest.raises(KdtreeError, match="got version 0\\.9\\.0") as raised:
        register()
    assert "\n" not in str(raised.value)
    evidence(name=BACKEND_NAME)
