"""Phase 3: whole engines of SGLang with the trained tiny model: plain, speculative, and speculative with our kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kdtree_engine.decode import read_weights
from kdtree_engine.sglang_backend.command import read, summary
from kdtree_engine.sglang_backend.parity import ROW_REL_L2
from oracle.decode import greedy
from oracle.mla_model import Model
from phases.exactness import round_to_bfloat16
from phases.phase3 import engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from phases.places import Place

    Evidence = Callable[..., None]

LAYERS = 2


def test_plain_text_is_the_oracles(plain: list[list[int]], evidence: Evidence) -> None:
    """The checkpoint is the tiny model: where float64 is clear about a token, the engine says it."""
    model = Model(*read_weights(engine.TINY, "target.safetensors", "config.json"))
    for prompt, text in zip(engine.PROMPTS, plain, strict=True):
        assert text == greedy(model, list(prompt), engine.COUNT, round_to_bfloat16).tokens
    evidence(texts=len(plain))


@pytest.mark.parametrize("mode", ["incumbent", "shadow", "serve"])
def test_speculative_text_is_the_plain_one(
    place: Place, plain: list[list[int]], mode: str, tmp_path: Path, evidence: Evidence
) -> None:
    """Trees by SGLang's kernel, by it with ours beside it, and by ours; ours is called for every verify there is."""
    extra, log = engine.speculative(tmp_path), tmp_path / "parity.jsonl"
    variables = {"KDTREE_ENGINE_SAMPLE": "1", "KDTREE_ENGINE_BUDGET": "inf", "KDTREE_ENGINE_PARITY_LOG": str(log)}
    if mode != "incumbent":
        extra["attention_backend"] = "kdtree_mla"
        variables["KDTREE_ENGINE_MODE"] = mode
    found = engine.run(place, tmp_path, extra, variables)
    assert found["tokens"] == plain
    accepted = [meta["spec_accept_length"] for meta in found["meta"]]
    assert max(accepted) > 2
    if mode == "incumbent":
        evidence(mode=mode, accepted=accepted)
        return
    events = read(log)
    layers, fallbacks = summary(events)
    assert not fallbacks
    assert sorted(layers) == list(range(LAYERS))
    assert all(layer.breaches == 0 for layer in layers.values())
    counters = [event["counters"] for event in events if event["event"] == "counters"][-1]
    # The last step of all is not in it: nothing came after it to read what it found.
    steps = sum(meta["spec_verify_ct"] for meta in found["meta"]) - 1
    assert counters["verify calls"] >= LAYERS * steps
    assert counters[f"served by {'kdtree-engine' if mode == 'serve' else 'SGLang'}"] == counters["verify calls"]
    worst = max(layer.row_rel_l2 for layer in layers.values())
    assert 0 < worst <= ROW_REL_L2
    evidence(mode=mode, accepted=accepted, row_rel_l2=worst, verify_calls=counters["verify calls"])
