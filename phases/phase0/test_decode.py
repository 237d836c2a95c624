"""The parts of kdtree_engine.decode, and the command on top; that its texts are right is phase 2's matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kdtree_engine.cli import main
from kdtree_engine.decode import (
    Decoder,
    DflashDrafter,
    MlaModel,
    NgramDrafter,
    arrays_for,
    read_weights,
)
from kdtree_engine.errors import DecodeError
from oracle import mla_model
from oracle.decode import greedy
from oracle.verify_attn import verify_attn
from phases.conftest import ROOT
from phases.exactness import round_to_bfloat16

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TINY = ROOT / "fixtures" / "tiny_model"
HOST = arrays_for("host")
TARGET = read_weights(TINY, "target.safetensors", "config.json")
DRAFTER = read_weights(TINY, "drafter.safetensors", "drafter.json")
MODEL = MlaModel(*TARGET, HOST)


def test_model_is_the_oracles() -> None:
    """A tree of five nodes over a prefix of seven: logits in float32 against float64, rounded alike."""
    reference = mla_model.Model(*TARGET)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, 12)
    positions = np.array([*range(7), 7, 8, 8, 9, 10])
    sees = np.tril(np.ones((12, 12), np.uint8))
    for node, parent in {8: 7, 9: 7, 10: 8, 11: 10}.items():
        sees[node, 7:] = sees[parent, 7:]
        sees[node, node] = 1

    def attend(_layer: int, q: Any, rows: Any) -> Any:
        shared: dict[str, Any] = {"sm_scale": MODEL.sm_scale, "mask": sees[None], "d_latent": 512}
        values = [(tensor.astype(np.uint32) << 16).view(np.float32) for tensor in (q, rows)]
        return verify_attn(values[0][None], values[1][None], **shared)[0][0].astype(np.float32)

    found, states = MODEL.forward(tokens, positions, attend)
    hidden, layers = reference.embed(tokens), []
    for layer in range(reference.num_layers):
        x = reference.before_attention(layer, hidden)
        q = round_to_bfloat16(reference.queries(layer, x, positions))
        rows = round_to_bfloat16(reference.rows(layer, x, positions))
        out, _ = verify_attn(q[None], rows[None], sm_scale=MODEL.sm_scale, mask=sees[None], d_latent=512)
        hidden = reference.after_attention(layer, hidden, out[0])
        layers.append(hidden)
    # A sum that lies on a boundary of bfloat16 may round either way: 2^-8 of one of 576 products.
    np.testing.assert_allclose(found, reference.logits(hidden), atol=0.03)
    np.testing.assert_allclose(states, np.concatenate(layers, axis=-1), atol=0.03)


def test_ngram_counts_what_follows() -> None:
    """Against counting at every place of the text, overlapping ones too."""
    text = b"abababab abacab aaaaaaaa aab ab abc " * 2
    drafter = NgramDrafter(text, 260, HOST)
    for context in (b"ab", b"aaa", b"xab", b" abababa", b"q", b""):
        law = drafter.law(context, text)
        for order in (7, 5, 3, 1):
            suffix = context[-order:] if len(context) >= order else None
            starts = range(len(text) - order) if suffix is not None else ()
            followers = [text[at + order] for at in starts if text[at : at + order] == suffix]
            if len(followers) >= 2 or order == 1:
                break
        counts = np.bincount(np.array(followers[-64:], int), minlength=260) + NgramDrafter.SMOOTHING
        np.testing.assert_allclose(law, counts / counts.sum(), rtol=1e-12)
    rows = drafter.draft(list(b" ab"), None, None)
    assert rows.shape == (7, 260)
    np.testing.assert_allclose(np.exp(rows).sum(-1), 1, rtol=1e-5)


def test_a_drafter_reads_its_window_alone() -> None:
    """States farther back than the window change nothing; within it they do."""
    drafter = DflashDrafter(*DRAFTER, HOST)
    states = np.random.default_rng(1).standard_normal((300, 1024)).astype(np.float32)
    tokens = [65] * 301
    rows = drafter.draft(tokens, states, MODEL.embedding)
    far, near = states.copy(), states.copy()
    far[:44], near[44] = np.nan, 0
    np.testing.assert_array_equal(drafter.draft(tokens, far, MODEL.embedding), rows)
    assert np.abs(drafter.draft(tokens, near, MODEL.embedding) - rows).max() > 1e-6


class Fixed:
    """A drafter that always says the same."""

    depth = 2

    def __init__(self, rows: Any) -> None:
        self.rows = np.array(rows, np.float32)

    def draft(self, tokens: Sequence[int], states: Any, embedding: Any) -> Any:
        del tokens, states, embedding
        return self.rows


def test_a_drafter_gone_mad_is_named() -> None:
    decoder = Decoder(MODEL, Fixed(np.full((2, 260), np.nan)), budget=4)
    with pytest.raises(DecodeError, match=r"^tree_build: request 0: .*NaN"):
        list(decoder.generate([[65]], 4))


@pytest.mark.parametrize(
    ("argument", "settings"),
    [
        ("budget", {"budget": -1}),
        ("budget", {"budget": 256}),
        ("width", {"budget": 4, "width": 0}),
        ("width", {"budget": 4, "width": 65}),
        ("temperature", {"temperature": -0.5}),
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": float("inf")}),
        ("drafter", {"budget": 4, "drafter": None}),
    ],
)
def test_settings_out_of_range(argument: str, settings: dict[str, Any]) -> None:
    with pytest.raises(DecodeError) as raised:
        Decoder(MODEL, **({"drafter": Fixed(np.zeros((2, 260)))} | settings))
    assert raised.value.argument == argument
    assert "expected" in str(raised.value) or "pass" in str(raised.value)


@pytest.mark.parametrize(
    ("argument", "prompts", "count"),
    [
        ("prompts", [], 4),
        ("prompts", [[]], 4),
        ("prompts", [[65], [260]], 4),
        ("prompts", [[-1]], 4),
        ("prompts", [[65] * 4093], 4),
        ("max_tokens", [[65]], 0),
        ("max_tokens", [[65]], -3),
    ],
)
def test_prompts_that_cannot_be_decoded(argument: str, prompts: list[list[int]], count: int) -> None:
    with pytest.raises(DecodeError) as raised:
        list(Decoder(MODEL).generate(prompts, count))
    assert raised.value.argument == argument


def test_rounds_say_what_was_done() -> None:
    """Trees, paths and tokens of each round fit together, and the text is as long as was asked for."""
    decoder = Decoder(MODEL, DflashDrafter(*DRAFTER, HOST), budget=12)
    rounds = list(decoder.generate([list(b"def "), list(b"x = ")], 30))
    for request, prompt in enumerate((b"def ", b"x = ")):
        mine = [done for done in rounds if done.request == request]
        assert [done.number for done in mine] == list(range(len(mine)))
        text = list(prompt)
        for done in mine:
            if done.number:
                assert done.tokens[0] == text[-1]
                assert [done.parents[node] for node in done.path] == [-1, *done.path[:-1]]
                assert [done.tokens[node] for node in done.path[1:]][: len(done.new)] == done.new[: len(done.path) - 1]
                assert len(done.new) == len(done.path) or done is mine[-1]
            assert len(done.margins) == len(done.new)
            text += done.new
        assert len(text) == len(prompt) + 30


def test_files_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match=r"cannot read .*config\.json"):
        read_weights(tmp_path, "target.safetensors", "config.json")
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "target.safetensors").write_bytes(b"no tensors")
    with pytest.raises(DecodeError, match="damaged"):
        read_weights(tmp_path, "target.safetensors", "config.json")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DecodeError, match="damaged"):
        read_weights(tmp_path, "target.safetensors", "config.json")
    save_file({"a": np.zeros(3, np.int8)}, tmp_path / "target.safetensors")
    with pytest.raises(DecodeError, match="a is I8, expected one of BF16"):
        read_weights(tmp_path, "target.safetensors", "config.json")


def test_models_of_another_kind() -> None:
    weights, config = TARGET
    with pytest.raises(DecodeError, match="rope"):
        MlaModel(weights, config | {"rope_parameters": {"rope_type": "yarn"}}, HOST)
    with pytest.raises(DecodeError, match="experts"):
        MlaModel(weights | {"model.layers.0.mlp.experts.0.up_proj.weight": np.zeros(1)}, config, HOST)
    short = {name: value for name, value in weights.items() if "layers.1.mlp.up" not in name}
    with pytest.raises(DecodeError, match=r"no tensor model\.layers\.1\.mlp\.up_proj"):
        MlaModel(short, config, HOST)
    with pytest.raises(DecodeError, match="no block_size"):
        DflashDrafter(DRAFTER[0], {}, HOST)


@pytest.fixture(autouse=True)
def _in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def generate(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(["generate", *arguments]) == status
    return capsys.readouterr().out


def test_command_streams_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    right = bytes(greedy(mla_model.Model(*TARGET), list(b"def "), 24, round_to_bfloat16).tokens).decode()
    text = generate(capsys, "def ", "--max-tokens", "24")
    assert text.startswith(f"def {right}\n")
    assert "rounds, mean accepted length" in text
    assert "tokens/s" in text
    assert "its text is the same" in text


def test_command_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(generate(capsys, "def ", "--max-tokens", "24", "--json", "--show-tree", "--chain"))
    assert found["equals_plain"] is True
    assert len(found["tokens"]) == 24
    assert found["text"] == bytes(found["tokens"]).decode()
    assert found["rounds"] == len(found["trees"])
    lengths = [len(tree["path"]) for tree in found["trees"]]
    assert found["mean_accepted_length"] == pytest.approx(np.mean(lengths))
    assert all(tree["parents"] == list(range(-1, len(tree["parents"]) - 1)) for tree in found["trees"])
    assert sum(len(tree["new"]) for tree in found["trees"]) == 23


def test_command_draws_trees(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = tmp_path / "text.py"
    source.write_text("def main() -> None:\n" * 5)
    options = ("--drafter", "ngram", "--text", str(source), "--tree-budget", "6", "--max-tokens", "12", "--no-check")
    text = generate(capsys, "def ma", *options, "--show-tree")
    assert "round 1: 7 nodes, accepted" in text
    assert "* '" in text
    assert "> '" in text
    assert "plain" not in text


def test_command_with_drawn_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """One seed gives one text, another gives another."""
    texts = [
        json.loads(generate(capsys, "def ", "--json", "--temperature", "1", "--max-tokens", "16", "--seed", seed))
        for seed in ("1", "1", "2")
    ]
    assert texts[0]["tokens"] == texts[1]["tokens"]
    assert texts[0]["tokens"] != texts[2]["tokens"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tree-budget", "300"], "budget: got 300, expected 0..255"),
        (["--max-tokens", "5000"], "prompts: got 4 tokens"),
        (["--model", "nowhere"], "model: cannot read nowhere"),
        (["--drafter", "ngram", "--text", "nowhere.py"], "nowhere.py"),
        (["--temperature", "-1"], "temperature: got -1.0"),
    ],
)
def test_command_refuses_in_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "def ", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_command_outside_a_checkout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "def "]) == 1
    assert "pass --model" in capsys.readouterr().err
    assert main(["generate", "def ", "--model", str(TINY), "--max-tokens", "2"]) == 0


def test_host_needs_no_torch() -> None:
    """Nothing on the way imports it; cuda without it is one line."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from kdtree_engine.cli import main\n"
        "assert main(['generate', 'def ', '--max-tokens', '4']) == 0\n"
        "sys.exit(main(['generate', 'def ', '--device', 'cuda']))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        == "kdtree-engine: device: cuda needs torch, which is not installed; install it, or take host"
    )


def test_a_terminal_is_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in generate(capsys, "\x1b[2Jdef ", "--max-tokens", "2", "--no-check")
