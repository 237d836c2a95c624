"""Phase 3: verify steps that a server keeps, as bundles: they are the steps, and phase 2 can replay them."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine import bundle as bundles
from kdtree_engine.errors import KdtreeError
from kdtree_engine.ops.verify_attn_paged import LSE_ABS, OUT_ROW_REL_L2, verify_attn_paged
from kdtree_engine.sglang_backend import backend as module
from phases import bundles as command
from phases import exactness
from phases.phase2.test_parity import call
from phases.phase3.world import Step, World, device

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from kdtree_engine.bundle import Bundle
    from kdtree_engine.sglang_backend import parity
    from phases.places import Place

    Evidence = Callable[..., None]

STEPS = [
    Step((37, 9)),
    Step((5,), nodes=17, heads=16, seed=1),
    Step((40, 1, 20), nodes=6, tree="chain", seed=3),
]


@pytest.fixture(autouse=True)
def capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every step is captured into a folder of the test's own."""
    monkeypatch.setenv("KDTREE_ENGINE_CAPTURE", str(tmp_path / "captured"))
    monkeypatch.setenv("KDTREE_ENGINE_CAPTURE_EVERY", "1")
    return tmp_path / "captured"


def serve(world: World, steps: int) -> list[Bundle]:
    """Steps, and what was captured of them. What a step finds is read at a later one's beginning."""
    for _ in range(steps):
        world.forward()
        if world.device == "cuda":
            import torch

            torch.cuda.synchronize()
    return captured(world)


def captured(world: World) -> list[Bundle]:
    recorder = world.backend.recorder
    recorder.drain()
    return [bundles.read(path) for path in recorder.written]


def bits(tensor: torch.Tensor) -> Any:
    import torch

    return tensor.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)


def assert_is_the_step(bundle: Bundle, world: World) -> None:
    step = world.step
    nodes = step.nodes
    assert bundle.request.prefix_len.tolist() == list(step.prefixes)
    assert bundle.request.num_nodes.tolist() == [nodes] * len(step.prefixes)
    assert bundle.sm_scale == pytest.approx(192**-0.5)
    np.testing.assert_array_equal(bundle.layers[0].q, bits(world.q).reshape(-1, step.heads, 576))
    pool, drafts = bits(world.pool.kv_buffer[0])[:, 0], bits(world.k)[:, 0]
    table = world.requests.req_to_token.cpu().numpy()
    for b, (row, prefix) in enumerate(zip(world.rows.tolist(), step.prefixes, strict=True)):
        kv = bundle.layers[0].kv[bundle.keys(b)]
        np.testing.assert_array_equal(kv[:prefix], pool[table[row, :prefix]])
        np.testing.assert_array_equal(kv[prefix:], drafts[b * nodes : (b + 1) * nodes])
        np.testing.assert_array_equal(bundle.visibility(b), world.visible[b])


@pytest.mark.parametrize("mode", ["off", "shadow", "serve"])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_is_kept_added_and_replayed(
    place: Place, state: parity.Parity, step: Step, mode: str, tmp_path: Path, evidence: Evidence
) -> None:
    """Bit for bit what the step read; `bundle add` takes it, and the paged kernel is right on it."""
    state.set_mode(mode)
    world = World.ours(step, device(place))
    found = serve(world, 3)
    assert found
    assert_is_the_step(found[0], world)
    placed = command.add(world.backend.recorder.written[0], root=tmp_path / "added")
    bundle = exactness.with_outputs(bundles.read(placed))
    attend = exactness.dense_attend(bundle, call(place, "verify_attn_flash_paged", bundle))
    failures, _ = exactness.numeric(bundle, attend, OUT_ROW_REL_L2, LSE_ABS)
    assert not failures
    evidence(step=str(step), mode=mode, bundles=len(found))


def test_nothing_private_is_in_it(place: Place, state: parity.Parity, evidence: Evidence) -> None:
    """No token, neither of the prompt nor of the drafts, no machine, no folder."""
    world = World.ours(STEPS[0], device(place))
    bundle = serve(world, 3)[0]
    assert not bundle.context.tokens.any()
    assert bundle.tree.tokens.tolist() == [*range(8), *range(8)]
    assert bundle.witness is None
    assert socket.gethostname() not in str(bundle.provenance)
    assert set(bundle.provenance) == {"generator", "layer", "why", "model_type", "libraries"}
    evidence(provenance=dict(bundle.provenance))


def test_the_step_that_breaks_parity_is_kept(
    place: Place, state: parity.Parity, monkeypatch: pytest.MonkeyPatch, evidence: Evidence
) -> None:
    """In the mode auto: that very step, not one after it, and one only."""
    monkeypatch.setenv("KDTREE_ENGINE_CAPTURE_EVERY", "1000000")
    state.set_mode("auto")
    world = World.ours(STEPS[0], device(place))
    assert serve(world, 3) == []
    real = verify_attn_paged

    def wrong(*args: Any, out: Any, **kwargs: Any) -> None:
        real(*args, out=out, **kwargs)
        out[1] *= 1.05

    monkeypatch.setattr(module, "verify_attn_paged", wrong)
    before = world.q
    world.q = before * 1.5
    world.forward()
    broken = world.q
    monkeypatch.setattr(module, "verify_attn_paged", real)
    world.q = before
    found = serve(world, 4)
    assert [bundle.provenance["why"] for bundle in found] == ["breach"]
    world.q = broken
    assert_is_the_step(found[0], world)
    assert state.counters["breaches"] == 1
    evidence(kernel="verify_attn_flash_paged")


@pytest.mark.parametrize(
    ("variable", "value", "files", "words"),
    [
        ("COUNT", "2", 2, ""),
        ("BYTES", "150000", 1, "the next bundle would pass 150000 bytes"),
        ("KEYS", "20", 0, "the step has more than 1024 nodes or 20 keys"),
        ("LAYERS", "7", 0, ""),
        ("EVERY", "4", 1, ""),
    ],
)
def test_limits(
    place: Place,
    state: parity.Parity,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
    files: int,
    words: str,
    evidence: Evidence,
) -> None:
    monkeypatch.setenv(f"KDTREE_ENGINE_CAPTURE_{variable}", value)
    world = World.ours(Step((37,), nodes=4), device(place))
    assert len(serve(world, 7)) == files
    assert words in caplog.text
    assert state.counters["verify calls"] == 7
    evidence(variable=variable, files=files)


def test_a_disk_that_fails_ends_the_capture_and_nothing_else(
    place: Place, state: parity.Parity, capture: Path, caplog: pytest.LogCaptureFixture, evidence: Evidence
) -> None:
    capture.write_text("a file where the folder is to be")
    world = World.ours(Step((37,), nodes=4), device(place))
    with caplog.at_level(logging.WARNING):
        assert serve(world, 6) == []
    assert caplog.text.count("capture: ended") == 1
    assert state.counters["verify calls"] == 6
    assert capture.read_text() == "a file where the folder is to be"
    evidence(kernel="verify_attn_flash_paged")


def test_a_mask_that_is_no_tree_is_left_out(
    place: Place, state: parity.Parity, caplog: pytest.LogCaptureFixture, evidence: Evidence
) -> None:
    world = World.ours(Step((37,), nodes=4), device(place))
    world.visible[0] = 1 - np.eye(4, dtype=np.uint8)
    assert serve(world, 3) == []
    assert "capture: left out: tree/" in caplog.text
    evidence(kernel="verify_attn_flash_paged")


def test_padding_of_a_graph_is_left_out(place: Place, state: parity.Parity, evidence: Evidence) -> None:
    """Requests whose prefix is the one row of slot 0."""
    world = World.ours(Step((37, 1), nodes=4), device(place))
    world.requests.req_to_token[world.rows[1], 0] = 0
    bundle = serve(world, 3)[0]
    assert bundle.request.prefix_len.tolist() == [37]
    np.testing.assert_array_equal(bundle.layers[0].q, bits(world.q).reshape(-1, 8, 576)[:4])
    evidence(kernel="verify_attn_flash_paged")


@pytest.mark.parametrize(("variable", "value"), [("LAYERS", "0,x"), ("COUNT", "0"), ("BYTES", "many")])
def test_variables_that_make_no_sense(
    place: Place, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, evidence: Evidence
) -> None:
    monkeypatch.setenv(f"KDTREE_ENGINE_CAPTURE_{variable}", value)
    with pytest.raises(KdtreeError, match=f"KDTREE_ENGINE_CAPTURE_{variable}: got '{value}'"):
        World.ours(STEPS[0], device(place))
    evidence(variable=variable)
