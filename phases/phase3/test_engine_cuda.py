"""Phase 3 on a GPU only: an engine whose verify steps are CUDA graphs, with our kernel in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kdtree_engine.sglang_backend.command import read, summary
from phases.phase3 import engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from phases.places import Place

    Evidence = Callable[..., None]


@pytest.mark.parametrize("mode", ["incumbent", "shadow", "serve"])
def test_a_padded_graph_says_the_plain_text(
    place: Place, plain: list[list[int]], mode: str, tmp_path: Path, evidence: Evidence
) -> None:
    """Three requests in a graph of four: by SGLang's kernel, by it with ours beside it, and by ours."""
    extra, log = engine.speculative(tmp_path) | engine.with_graphs(), tmp_path / "parity.jsonl"
    variables = {"KDTREE_ENGINE_SAMPLE": "1", "KDTREE_ENGINE_BUDGET": "inf", "KDTREE_ENGINE_PARITY_LOG": str(log)}
    if mode != "incumbent":
        extra["attention_backend"] = "kdtree_mla"
        variables["KDTREE_ENGINE_MODE"] = mode
    found = engine.run(place, tmp_path, extra, variables, at_once=True)
    assert found["tokens"] == plain
    accepted = [meta["spec_accept_length"] for meta in found["meta"]]
    assert max(accepted) > 2
    if mode == "incumbent":
        evidence(mode=mode, accepted=accepted)
        return
    layers, fallbacks = summary(read(log))
    assert not fallbacks
    # Calls from Python are those of the capture; that steps were replayed shows in what was compared.
    steps = max(meta["spec_verify_ct"] for meta in found["meta"]) - 1
    assert all(layer.compared >= steps for layer in layers.values())
    assert all(layer.breaches == 0 for layer in layers.values())
    evidence(mode=mode, accepted=accepted, compared=[layer.compared for layer in layers.values()])
