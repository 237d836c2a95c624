"""Phase 3: the backend class on SGLang's own batches, against float64 and against SGLang's Triton kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kdtree_engine.errors import KernelError
from kdtree_engine.ops.verify_attn_paged import OUT_ROW_REL_L2, verify_attn_paged
from kdtree_engine.sglang_backend import backend as module
from kdtree_engine.sglang_backend import parity
from phases.conftest import ROOT
from phases.phase3.world import Step, World, device

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


def worst_row(found: torch.Tensor, right: np.ndarray[Any, Any]) -> float:
    difference = found.double().cpu().numpy().reshape(right.shape) - right
    return float((np.linalg.norm(difference, axis=-1) / np.linalg.norm(right, axis=-1)).max())


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_serves_what_float64_gives(place: Place, state: parity.Parity, step: Step, evidence: Evidence) -> None:
    state.set_mode("serve")
    world = World.ours(step, device(place))
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
    world, parent = World.both(step, device(place))
    found, right = world.forward(), parent.forward()
    assert torch.equal(found, right)
    world.settled()
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
    world, parent = World.both(STEPS[0], device(place))
    assert torch.equal(world.forward(), parent.forward())
    assert state.counters == {"verify calls": 1, "served by SGLang": 1}
    evidence(kernel="verify_attn_flash_paged")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_types_are_left_to_the_incumbent(
    place: Place, state: parity.Parity, dtype: str, evidence: Evidence
) -> None:
    state.set_mode("serve")
    step = Step((37, 9), nodes=4, dtype=dtype)
    world, parent = World.both(step, device(place))
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
    world = World.ours(STEPS[0], device(place))

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
    right = World.theirs(STEPS[0], device(place)).forward()
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
    world = World.ours(STEPS[0], device(place))
    right = World.theirs(STEPS[0], device(place)).forward()
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
    world = World.ours(STEPS[0], device(place))
    assert torch.equal(world.forward(), World.theirs(STEPS[0], device(place)).forward())
    assert any("nox -s build" in name for name in state.counters)
    evidence(kernel="verify_attn_flash_paged")


def test_sparse_attention_is_refused(place: Place, state: parity.Parity, evidence: Evidence) -> None:
    """A model that selects keys, where a context may have more of them."""
    state.set_mode("serve")
    world = World.ours(STEPS[0], device(place))
    for keys, context, refused in ((2048, 4096, True), (2048, 2048, False)):
        config = world.runner.model_config
        config.hf_config.index_topk, config.context_len = keys, context
        assert ("dense attention is wrong" in world.backend._why_never(world.runner)) is refused
    evidence(kernel="verify_attn_flash_paged")


def test_deterministic_mode_is_the_parents(place: Place, state: parity.Parity, evidence: Evidence) -> None:
    state.set_mode("serve")
    step = Step((20,), nodes=4)
    world, parent = World.both(step, device(place), deterministic=True)
    assert torch.equal(world.forward(), parent.forward())
    assert state.counters["fallback: deterministic mode has a kernel of its own"] == 1
    evidence(kernel="verify_attn_flash_paged")


def test_no_memory_for_ours_is_survived(
    place: Place, state: parity.Parity, monkeypatch: pytest.MonkeyPatch, evidence: Evidence
) -> None:
    """Neither for the workspace nor for anything else that ours asks for; the step is the incumbent's."""
    state.set_mode("serve")
    world, parent = World.both(STEPS[0], device(place))

    def fails(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nMore lines")

    monkeypatch.setattr(module, "verify_attn_paged", fails)
    assert torch.equal(world.forward(), parent.forward())
    assert state.counters["errors"] == 1
    assert [name for name in state.counters if name.startswith("fallback")] == [
        "fallback: CUDA out of memory. Tried to allocate 1 GiB."
    ]
    evidence(kernel="verify_attn_flash_paged")


@pytest.mark.parametrize("mode", ["shadow", "serve"])
def test_rows_behind_the_last_request_are_nobodys(
    place: Place, state: parity.Parity, mode: str, evidence: Evidence
) -> None:
    """Rows of padding hold NaN in queries and drafts; they neither reach a request nor count in a comparison."""
    state.set_mode(mode)
    state.serve_share = 1.0
    world = World.ours(STEPS[0], device(place))
    alone, live = world.forward(), len(world.q)
    state.layers.clear()
    world.pad(5)
    padded = world.forward()
    assert torch.equal(padded[:live], alone)
    world.settled()
    assert state.layers[0].compared >= 1
    assert state.layers[0].breaches == 0
    evidence(mode=mode, row_rel_l2=state.layers[0].row_rel_l2)


@pytest.mark.parametrize("mode", ["shadow", "serve"])
def test_ragged_lengths(place: Place, state: parity.Parity, mode: str, evidence: Evidence) -> None:
    """Requests that verify fewer nodes than others, and one that verifies none, as the metadata may say it."""
    state.set_mode(mode)
    state.serve_share = 1.0
    world, parent = World.both(Step((37, 20, 9), nodes=8, tree="chain", seed=5), device(place))
    lengths = (8, 0, 3)
    found, right = world.forward(lengths=lengths), parent.forward(lengths=lengths)
    answer = world.answer(lengths=lengths)
    rows = len(answer)
    bound = OUT_ROW_REL_L2 if mode == "serve" else parity.ROW_REL_L2
    assert worst_row(found[:rows], answer) <= bound
    if mode == "shadow":
        assert torch.equal(found[:rows], right[:rows])
    world.settled()
    assert (state.layers[0].compared, state.layers[0].breaches) == (1, 0)
    evidence(mode=mode, row_rel_l2=worst_row(found[:rows], answer))


@pytest.mark.parametrize("mode", ["off", "shadow", "serve"])
def test_a_step_without_requests(place: Place, state: parity.Parity, mode: str, evidence: Evidence) -> None:
    """A rank of data parallel attention that has nothing to do: nothing comes of it, and the next step is right."""
    state.set_mode(mode)
    state.serve_share = 1.0
    world = World.ours(STEPS[0], device(place))
    right = world.forward()
    assert world.idle().shape == (0, 8 * 512)
    assert torch.equal(world.forward(), right)
    assert state.counters["verify calls"] == 3
    assert state.counters["errors"] == 0
    world.settled()
    assert mode == "off" or state.layers[0].compared == 2
    evidence(mode=mode)


def test_auto_compares_a_size_of_batch_before_it_serves_it(
    place: Place, state: parity.Parity, evidence: Evidence
) -> None:
    """Each is a CUDA graph of its own, whose first comparison must not be the users'."""
    state.auto_calls, state.serve_share = 2, 0.0
    state.set_mode("auto")
    worlds = [World.ours(Step((37,) * size, nodes=4), device(place)) for size in (1, 2)]
    for _ in range(4):
        worlds[0].forward()
        worlds[0].settled()
    assert state.serving
    served = state.counters["served by kdtree-engine"]
    backend = worlds[0].backend
    worlds[1].backend = backend
    backend.token_to_kv_pool = worlds[1].pool
    batch = worlds[1].batch()
    backend._between_steps(batch)
    assert (backend._serves, backend._compares) == (False, True)
    backend._between_steps(batch)
    assert (backend._serves, backend._compares) == (True, False)
    assert state.counters["served by kdtree-engine"] == served
    evidence(served=served)


@pytest.mark.parametrize("mode", ["off", "shadow", "serve"])
def test_the_mask_is_compact_where_the_release_lets_a_backend_own_it(
    place: Place, state: parity.Parity, mode: str, evidence: Evidence
) -> None:
    """n x n a request from SGLang's tree builder for both kernels; elsewhere n x (prefix + n), and that is read."""
    state.set_mode(mode)
    state.serve_share = 1.0
    step = Step((37, 90), nodes=6, seed=7)
    world, parent = World.both(step, device(place))
    right = parent.forward()
    world.backend._may_compact = True
    world.backend.init_cuda_graph_state(4, 4 * step.nodes)
    owned = getattr(world.backend, "verify_mask", None)
    assert world.backend._compact is (owned is not None)
    if owned is not None:
        assert (owned.mode.name, owned.buffer.numel()) == ("QLEN_ONLY", 4 * 6 * 7)
        world.mask_buffer = owned.buffer
    found = world.forward()
    if mode == "serve":
        assert worst_row(found, world.answer()) <= OUT_ROW_REL_L2
    else:
        assert torch.equal(found, right)
    world.settled()
    assert state.counters["breaches"] == 0
    evidence(mode=mode, compact=world.backend._compact)


PROGRAM = """
from phases.phase3 import stand_ins
stand_ins.install()
from sglang.srt.utils.common import set_prometheus_multiproc_dir
set_prometheus_multiproc_dir()
from kdtree_engine.sglang_backend.metrics import Metrics
from collections import Counter
metrics, counters = Metrics(3), Counter({"verify calls": 5, "fallback: it is Tuesday": 2})
metrics.update(counters, serving=False)
counters["verify calls"] += 4
metrics.update(counters, serving=True)
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_counters_reach_the_metrics_endpoint(place: Place, evidence: Evidence) -> None:
    """As SGLang's endpoint collects them from the files of a server's processes."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert 'kdtree_engine:verify_events_total{event="verify calls",tp_rank="3"} 9.0' in lines
    assert 'kdtree_engine:verify_events_total{event="fallback: it is Tuesday",tp_rank="3"} 2.0' in lines
    assert any(line.startswith("kdtree_engine:serving{") and line.endswith(" 1.0") for line in lines)
    evidence(lines=len(lines))
