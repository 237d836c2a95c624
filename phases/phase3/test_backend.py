"""Phase 3: the backend class on SGLang's own batches, against float64 and against SGLang's Triton kernel."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from kdtree_engine.errors import KernelError
from kdtree_engine.ops.verify_attn_paged import OUT_ROW_REL_L2, verify_attn_paged
from kdtree_engine.sglang_backend import backend as module
from kdtree_engine.sglang_backend import parity
from kdtree_engine.sglang_backend.backend import KDTreeMLAVerifyBackend
from phases.phase3.world import Step, World

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from phases.places import Place

    Evidence = Callable[..., None]

STEPS = [
    Step((37, 90)),
    Step((5,), nodes=17, heads=16, seed=1),
    Step((64, 1, 33), nodes=1, seed=2),
    Step((130, 20), nodes=6, tree="chain", seed=3),
]


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> parity.Parity:
    """A process's state of the test's own."""
    made = parity.Parity()
    monkeypatch.setattr(parity, "_process", made)
    return made


def device(place: Place) -> str:
    return "cuda" if place.kind == "cuda" else "cpu"


def worst_row(found: torch.Tensor, right: np.ndarray[Any, Any]) -> float:
    difference = found.double().cpu().numpy().reshape(right.shape) - right
    return float((np.linalg.norm(difference, axis=-1) / np.linalg.norm(right, axis=-1)).max())


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_serves_what_float64_gives(place: Place, state: parity.Parity, step: Step, evidence: Evidence) -> None:
    state.set_mode("serve")
    world = World(KDTreeMLAVerifyBackend, step, device(place))
    error = worst_row(world.forward(), world.answer())
    evidence(step=str(step), row_rel_l2=error)
    assert error <= OUT_ROW_REL_L2
    assert state.counters["served by kdtree-engine"] == 1
    assert not [name for name in state.counters if name.startswith("fallback")]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_shadow_uses_the_incumbent_and_compares(
    place: Place, state: parity.Parity, step: Step, evidence: Evidence
) -> None:
    """The output is the parent class's to the bit; the figures are those of the two outputs."""
    world, parent = (World(kind, step, device(place)) for kind in (KDTreeMLAVerifyBackend, TritonAttnBackend))
    found, right = world.forward(), parent.forward()
    assert torch.equal(found, right)
    world.backend._collect()
    if place.kind == "cuda":
        torch.cuda.synchronize()
    world.backend._collect()
    layer = state.layers[0]
    assert layer.compared == 1
    assert layer.breaches == 0
    state.set_mode("serve")
    ours = world.forward().double().cpu().numpy().reshape(world.answer().shape)
    theirs = right.double().cpu().numpy().reshape(ours.shape)
    rows = np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)
    assert layer.row_rel_l2 == pytest.approx(rows.max(), rel=1e-3)
    assert layer.rel_l2 == pytest.approx(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs), rel=1e-3)
    assert layer.max_abs == pytest.approx(np.abs(ours - theirs).max(), rel=1e-6)
    evidence(step=str(step), row_rel_l2=layer.row_rel_l2, incumbent_row_rel_l2=worst_row(right, world.answer()))


def test_off_is_the_parent(place: Place, state: parity.Parity, evidence: Evidence) -> None:
    state.set_mode("off")
    world, parent = (World(kind, STEPS[0], device(place)) for kind in (KDTreeMLAVerifyBackend, TritonAttnBackend))
    assert torch.equal(world.forward(), parent.forward())
    assert state.counters == {"verify calls": 1, "served by SGLang": 1}
    evidence(kernel="verify_attn_flash_paged")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_types_are_left_to_the_incumbent(
    place: Place, state: parity.Parity, dtype: str, evidence: Evidence
) -> None:
    state.set_mode("serve")
    step = Step((37, 9), nodes=4, dtype=dtype)
    world, parent = (World(kind, step, device(place)) for kind in (KDTreeMLAVerifyBackend, TritonAttnBackend))
    assert torch.equal(world.forward(), parent.forward())
    assert worst_row(world.forward(), world.answer()) < 4e-3
    assert state.counters[f"fallback: queries are {dtype}, bfloat16 is possible"] == 2
    evidence(dtype=dtype)


def test_auto_serves_after_clean_calls_and_goes_back(
    place: Place, state: parity.Parity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, evidence: Evidence
) -> None:
    """Shadow for three comparisons, then serve; a kernel gone wrong is noticed and no longer used."""
    log = tmp_path / "parity.jsonl"
    state.log, state.auto_calls, state.serve_share = parity.Log(log), 3, 1.0
    state.set_mode("auto")
    world = World(KDTreeMLAVerifyBackend, STEPS[0], device(place))

    def steps(count: int) -> None:
        for _ in range(count):
            world.forward()
            if place.kind == "cuda":
                torch.cuda.synchronize()

    steps(3)
    assert not state.serving
    steps(3)
    assert state.serving
    assert state.counters["served by kdtree-engine"] >= 1
    real = verify_attn_paged

    def wrong(*args: Any, out: Any, **kwargs: Any) -> None:
        real(*args, out=out, **kwargs)
        out[1] *= 1.05

    monkeypatch.setattr(module, "verify_attn_paged", wrong)
    steps(4)
    assert not state.serving
    assert state.counters["breaches"] >= 1
    right = World(TritonAttnBackend, STEPS[0], device(place)).forward()
    assert torch.equal(world.forward(), right)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "mode"
    assert "breach" in kinds
    assert [event["serving"] for event in events if event["event"] == "mode"] == [False, True, False]
    evidence(kernel="verify_attn_flash_paged")


def test_a_kernel_error_is_survived(
    place: Place, state: parity.Parity, monkeypatch: pytest.MonkeyPatch, evidence: Evidence
) -> None:
    """The step falls back, is counted, and the next one is served again."""
    state.set_mode("serve")
    world = World(KDTreeMLAVerifyBackend, STEPS[0], device(place))
    right = World(TritonAttnBackend, STEPS[0], device(place)).forward()
    real = verify_attn_paged

    def fails(*_: Any, **__: Any) -> None:
        raise KernelError("workspace", "out of memory")

    monkeypatch.setattr(module, "verify_attn_paged", fails)
    assert torch.equal(world.forward(), right)
    assert state.counters["errors"] == 1
    monkeypatch.setattr(module, "verify_attn_paged", real)
    assert worst_row(world.forward(), world.answer()) <= OUT_ROW_REL_L2
    assert state.counters["served by kdtree-engine"] == 1
    evidence(kernel="verify_attn_flash_paged")


def test_without_a_library_it_is_the_parent(
    place: Place, state: parity.Parity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, evidence: Evidence
) -> None:
    state.set_mode("serve")
    monkeypatch.setenv("KDTREE_ENGINE_LIBRARY_DIR", str(tmp_path))
    world = World(KDTreeMLAVerifyBackend, STEPS[0], device(place))
    assert torch.equal(world.forward(), World(TritonAttnBackend, STEPS[0], device(place)).forward())
    assert any("nox -s build" in name for name in state.counters)
    evidence(kernel="verify_attn_flash_paged")


def test_sparse_attention_is_refused(place: Place, state: parity.Parity, evidence: Evidence) -> None:
    """A model that selects keys, where a context may have more of them."""
    state.set_mode("serve")
    world = World(KDTreeMLAVerifyBackend, STEPS[0], device(place))
    for keys, context, refused in ((2048, 4096, True), (2048, 2048, False)):
        config = world.runner.model_config
        config.hf_config.index_topk, config.context_len = keys, context
        assert ("dense attention is wrong" in world.backend._why_never(world.runner)) is refused
    evidence(kernel="verify_attn_flash_paged")


def test_deterministic_mode_is_the_parents(place: Place, state: parity.Parity, evidence: Evidence) -> None:
    state.set_mode("serve")
    step = Step((20,), nodes=4)
    world, parent = (
        World(kind, step, device(place), deterministic=True) for kind in (KDTreeMLAVerifyBackend, TritonAttnBackend)
    )
    assert torch.equal(world.forward(), parent.forward())
    assert state.counters["fallback: deterministic mode has a kernel of its own"] == 1
    evidence(kernel="verify_attn_flash_paged")
