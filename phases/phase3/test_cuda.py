"""Phase 3 on a GPU only: CUDA graphs of verify steps, in which the mode may change between replays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kdtree_engine.ops.verify_attn_paged import OUT_ROW_REL_L2, verify_attn_paged
from kdtree_engine.sglang_backend import backend as module
from phases.phase3 import releases
from phases.phase3.graph import Graph
from phases.phase3.test_backend import STEPS, worst_row
from phases.phase3.test_capture import assert_is_the_step, bits, captured
from phases.phase3.world import Step, World

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kdtree_engine.sglang_backend import parity
    from phases.places import Place

    Evidence = Callable[..., None]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_mode_changes_between_replays(place: Place, state: parity.Parity, step: Step, evidence: Evidence) -> None:
    """One capture: each mode's output is that of its kernel alone, and what is compared is counted."""
    graph = Graph(World.ours(step, "cuda"))
    parent = Graph(World.theirs(step, "cuda"))
    answer, theirs = graph.world.answer(), parent.replay()
    state.set_mode("off")
    assert torch.equal(graph.replay(), theirs)
    state.layers.clear()
    state.set_mode("shadow")
    for _ in range(3):
        assert torch.equal(graph.replay(), theirs)
    graph.world.settled()
    assert state.layers[0].compared >= 3
    assert state.counters["breaches"] == 0
    shadow = state.layers[0].row_rel_l2
    assert shadow > 0
    state.serve_share = 0.0
    state.set_mode("serve")
    ours = graph.replay()
    assert worst_row(ours, answer) <= OUT_ROW_REL_L2
    right = theirs.double().cpu().numpy().reshape(answer.shape)
    rows = np.linalg.norm(ours.double().cpu().numpy().reshape(answer.shape) - right, axis=-1)
    assert shadow == pytest.approx((rows / np.linalg.norm(right, axis=-1)).max(), rel=1e-3)
    state.set_mode("shadow")
    assert torch.equal(graph.replay(), theirs)
    evidence(step=str(step), row_rel_l2=worst_row(ours, answer), against_incumbent=shadow)


def test_a_share_of_served_replays_is_compared(place: Place, state: parity.Parity, evidence: Evidence) -> None:
    graph = Graph(World.ours(STEPS[0], "cuda"))
    state.serve_share = 0.5
    state.set_mode("serve")
    state.layers.clear()
    outs = [graph.replay() for _ in range(8)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    graph.world.settled()
    assert state.layers[0].compared in (4, 5)
    evidence(compared=state.layers[0].compared)


def test_eager_steps_read_nothing_from_the_device(place: Place, state: parity.Parity, evidence: Evidence) -> None:
    """A verify call in each mode, with host reads forbidden."""
    world = World.ours(STEPS[0], "cuda")
    world.forward()
    for mode in ("shadow", "serve", "off"):
        state.set_mode(mode)
        with releases.context(world.backend):
            batch = world.batch()
            world.backend.init_forward_metadata(batch)
            torch.cuda.set_sync_debug_mode("error")
            try:
                world.attend(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    evidence(modes=3)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KDTREE_ENGINE_CAPTURE", str(tmp_path / "captured"))
    monkeypatch.setenv("KDTREE_ENGINE_CAPTURE_EVERY", "2")


@pytest.mark.usefixtures("capture")
@pytest.mark.parametrize("mode", ["off", "shadow", "serve"])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_replayed_step_is_captured(
    place: Place, state: parity.Parity, step: Step, mode: str, evidence: Evidence
) -> None:
    """From inside a graph, whose tensors are gone when the host looks; other queries come before and after."""
    state.set_mode(mode)
    graph = Graph(World.ours(step, "cuda"))
    world = graph.world
    queries = [torch.randn_like(world.q) for _ in range(8)]
    for q in queries:
        world.q.copy_(q)
        graph.replay()
    found = captured(world)
    assert len(found) >= 2
    for bundle in found:
        rows = bundle.layers[0].q.reshape(-1)
        (number,) = [i for i, q in enumerate(queries) if np.array_equal(bits(q).reshape(-1), rows)]
        world.q.copy_(queries[number])
        assert_is_the_step(bundle, world)
    evidence(step=str(step), mode=mode, bundles=len(found))


@pytest.mark.usefixtures("capture")
def test_the_replay_that_breaks_parity_is_kept(
    place: Place, state: parity.Parity, monkeypatch: pytest.MonkeyPatch, evidence: Evidence
) -> None:
    """A kernel that goes wrong between two replays, while it serves: that replay's inputs, and no other's."""
    monkeypatch.setenv("KDTREE_ENGINE_CAPTURE_EVERY", "1000000")
    wrong = torch.ones(1, dtype=torch.bfloat16, device="cuda")
    real = verify_attn_paged

    def turns(*args: Any, out: Any, **kwargs: Any) -> None:
        real(*args, out=out, **kwargs)
        out[1] *= wrong

    monkeypatch.setattr(module, "verify_attn_paged", turns)
    state.auto_calls, state.serve_share = 3, 1.0
    state.set_mode("auto")
    graph = Graph(World.ours(STEPS[0], "cuda"))
    world = graph.world
    for _ in range(8):
        graph.replay()
    assert state.serving
    assert captured(world) == []
    right = world.q.clone()
    world.q.mul_(1.5)
    broken = world.q.clone()
    wrong.fill_(1.25)
    graph.replay()
    wrong.fill_(1.0)
    world.q.copy_(right)
    for _ in range(2):
        graph.replay()
    assert not state.serving
    found = captured(world)
    assert [bundle.provenance["why"] for bundle in found] == ["breach"]
    world.q.copy_(broken)
    assert_is_the_step(found[0], world)
    evidence(breaches=state.counters["breaches"])
