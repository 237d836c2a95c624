"""Phase 3: whole engines of SGLang with the trained tiny model: plain, speculative, and speculative with our kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

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

PROMPTS = [b"def ", b"import ", b"def "]
COUNT = 12
LAYERS = 2


def run(place: Place, folder: Path, extra: dict[str, Any], **variables: str) -> dict[str, Any]:
    """What an engine says of its prompts, in a process of its own."""
    device = "cuda" if place.kind == "cuda" else "cpu"
    given = engine.arguments(folder, device) | extra
    given |= {"prompts": [list(prompt) for prompt in PROMPTS], "max_tokens": COUNT}
    (folder / "arguments.json").write_text(json.dumps(given))
    if device == "cpu":
        # The draft model's first step would compile for a minute.
        variables |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "phases.phase3.engine"]
    command += [str(folder / "found.json"), str(folder / "arguments.json")]
    environment = engine.environment(folder / "site", **variables)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (folder / "found.json").exists(), done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def plain(place: Place, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The texts of plain decoding with SGLang's kernels."""
    return list(run(place, tmp_path_factory.mktemp("plain"), {})["tokens"])


def test_plain_text_is_the_oracles(plain: list[list[int]], evidence: Evidence) -> None:
    """The checkpoint is the tiny model: where float64 is clear about a token, the engine says it."""
    model = Model(*read_weights(engine.TINY, "target.safetensors", "config.json"))
    for prompt, text in zip(PROMPTS, plain, strict=True):
        assert text == greedy(model, list(prompt), COUNT, round_to_bfloat16).tokens
    evidence(texts=len(plain))


@pytest.mark.parametrize("mode", ["incumbent", "shadow", "serve"])
def test_speculative_text_is_the_plain_one(
    place: Place, plain: list[list[int]], mode: str, tmp_path: Path, evidence: Evidence
) -> None:
    """Trees by SGLang's kernel, by it with ours beside it, and by ours; ours is called for every verify there is."""
    extra, log = engine.speculative(tmp_path), tmp_path / "parity.jsonl"
    variables = {"KDTREE_ENGINE_SAMPLE": "1", "KDTREE_ENGINE_PARITY_LOG": str(log)}
    if mode != "incumbent":
        extra["attention_backend"] = "kdtree_mla"
        variables["KDTREE_ENGINE_MODE"] = mode
    found = run(place, tmp_path, extra, **variables)
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
