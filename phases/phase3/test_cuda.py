"""Phase 3 on a GPU only: CUDA graphs of verify steps, in which the mode may change between replays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from kdtree_engine.ops.verify_attn_paged import OUT_ROW_REL_L2
from kdtree_engine.sglang_backend import parity
from kdtree_engine.sglang_backend.backend import KDTreeMLAVerifyBackend
from phases.phase3.test_backend import STEPS, worst_row
from phases.phase3.world import LATENT, Step, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from phases.places import Place

    Evidence = Callable[..., None]


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> parity.Parity:
    """A process's state of the test's own."""
    made = parity.Parity()
    monkeypatch.setattr(parity, "_process", made)
    return made


class Graph:
    """A world's step in a CUDA graph, as SGLang's runner captures and replays it."""

    def __init__(self, world: World) -> None:
        self.world, self.batch = world, world.batch()
        backend, step = world.backend, world.step
        backend.init_cuda_graph_state(len(step.prefixes), len(step.prefixes) * step.nodes)
        backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self._layer()
        torch.cuda.synchronize()
        backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self._layer()

    def _layer(self) -> torch.Tensor:
        world = self.world
        with world.context():
            return world.layer(world.q, world.k, world.k[..., :LATENT], self.batch)

    def replay(self) -> torch.Tensor:
        self.world.backend.init_forward_metadata_out_graph(self.batch)
        self.out.fill_(torch.nan)
        self.graph.replay()
        torch.cuda.synchronize()
        return self.out.clone()


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_mode_changes_between_replays(place: Place, state: parity.Parity, step: Step, evidence: Evidence) -> None:
    """One capture: each mode's output is that of its kernel alone, and what is compared is counted."""
    graph = Graph(World(KDTreeMLAVerifyBackend, step, "cuda"))
    parent = Graph(World(TritonAttnBackend, step, "cuda"))
    answer, theirs = graph.world.answer(), parent.replay()
    state.set_mode("off")
    assert torch.equal(graph.replay(), theirs)
    state.layers.clear()
    state.set_mode("shadow")
    for _ in range(3):
        assert torch.equal(graph.replay(), theirs)
    graph.world.backend._collect()
    torch.cuda.synchronize()
    graph.world.backend._collect()
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
    graph = Graph(World(KDTreeMLAVerifyBackend, STEPS[0], "cuda"))
    state.serve_share = 0.5
    state.set_mode("serve")
    state.layers.clear()
    outs = [graph.replay() for _ in range(8)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    for _ in range(2):
        graph.world.backend._collect()
        torch.cuda.synchronize()
    assert state.layers[0].compared in (4, 5)
    evidence(compared=state.layers[0].compared)


def test_eager_steps_read_nothing_from_the_device(place: Place, state: parity.Parity, evidence: Evidence) -> None:
    """A verify call in each mode, with host reads forbidden."""
    world = World(KDTreeMLAVerifyBackend, STEPS[0], "cuda")
    world.forward()
    for mode in ("shadow", "serve", "off"):
        state.set_mode(mode)
        with world.context():
            batch = world.batch()
            world.backend.init_forward_metadata(batch)
            torch.cuda.set_sync_debug_mode("error")
            try:
                world.layer(world.q, world.k, world.k[..., :LATENT], batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    evidence(modes=3)
