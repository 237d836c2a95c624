"""Capture against the models it reads: random small ones of every family, with the real attention geometry.

The right values come from the model: it expands keys and values per head, the capture and the oracle absorb.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DynamicCache,
    Glm4MoeLiteConfig,
    LlamaConfig,
)

from kdtree_engine import BundleError, bundle, capture
from oracle import mla_model
from oracle.verify_attn import verify_attn
from phases import exactness
from phases.conftest import BUNDLES

if TYPE_CHECKING:
    from pathlib import Path

    from kdtree_engine.capture import VerifyStep

VOCAB, HEADS, PREFIX, NODES = 300, 8, 40, 17

# A float64 model still forms its softmax, norms and rotary factors in float32; captures measure 2e-7.
FLOAT64_REL_L2 = 1e-6
# The same roundings behind two layers and the head, relative to the largest logit.
LOGIT_REL = 1e-5


def yarn(factor: float, mscale: float) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
    }


@dataclass(frozen=True)
class Family:
    """A kind of model: what its config says, and the softmax scale that its papers' formulas give."""

    config: type
    sm_scale: float
    options: dict[str, Any] = field(default_factory=dict)
    dense: bool = False


WIDE = {"qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 262144}
FAMILIES = {
    "deepseek_v2": Family(DeepseekV2Config, 192**-0.5, WIDE),
    "deepseek_v2_lite_yarn40": Family(
        DeepseekV2Config, 0.114721387, WIDE | {"q_lora_rank": None, "rope_parameters": yarn(40.0, 0.707)}
    ),
    "deepseek_v3": Family(DeepseekV3Config, 128**-0.5),
    "deepseek_v3_halves": Family(
        DeepseekV3Config, 128**-0.5, {"rope_interleave": False, "q_lora_rank": None}, dense=True
    ),
    "kimi_k2_yarn64": Family(DeepseekV3Config, 0.144679626, WIDE | {"rope_parameters": yarn(64.0, 1.0)}),
    "kimi_k2_yarn64_dense": Family(
        DeepseekV3Config, 0.144679626, WIDE | {"rope_parameters": yarn(64.0, 1.0)}, dense=True
    ),
    "glm4_moe_lite": Family(Glm4MoeLiteConfig, 0.0625, {"qk_nope_head_dim": 192, "v_head_dim": 256}),
}


def build(name: str, seed: int, dtype: torch.dtype = torch.float64) -> Any:
    family = FAMILIES[name]
    first_dense = 2 if family.dense else 1
    kinds = ["dense"] * first_dense + ["sparse"] * (2 - first_dense)
    layers = (
        {"mlp_layer_types": kinds} if family.config is Glm4MoeLiteConfig else {"first_k_dense_replace": first_dense}
    )
    config = family.config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 256,
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "q_lora_rank": 96,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "initializer_range": 0.06,
        }
        | layers
        | family.options
    )
    # The grouped matrix product of the experts refuses float64.
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return model.to(dtype).eval()


def random_tree(rng: np.random.Generator, n: int) -> tuple[list[int], list[int]]:
    """Tokens, all different, and parents."""
    tokens = rng.permutation(VOCAB)[:n].tolist()
    return tokens, [-1, *(int(rng.integers(node)) for node in range(1, n))]


def random_step(model: Any, seed: int, prefix: int = PREFIX, n: int = NODES) -> VerifyStep:
    rng = np.random.default_rng(seed)
    return capture.verify_step(model, rng.integers(VOCAB, size=prefix).tolist(), *random_tree(rng, n))


def branch(step: VerifyStep, node: int) -> list[int]:
    path = [node]
    while path[0] != 0:
        path.insert(0, int(step.parents[path[0]]))
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_absorbed_attention_is_the_models_own(name: str) -> None:
    model = build(name, seed=1)
    step = random_step(model, seed=2)
    assert step.sm_scale == pytest.approx(FAMILIES[name].sm_scale, rel=1e-8)
    mask = np.pad(step.visibility, ((0, 0), (PREFIX, 0)), constant_values=1)
    for layer, module in zip(step.layers, model.model.layers, strict=True):
        assert layer.q.shape == (NODES, HEADS, 576)
        assert layer.kv.shape == (PREFIX + NODES, 576)
        out, _ = verify_attn(layer.q[None], layer.kv[None], sm_scale=step.sm_scale, mask=mask[None])
        both = module.self_attn.kv_b_proj.weight.detach().numpy().reshape(HEADS, -1, 512)
        value_up = both[:, -module.self_attn.v_head_dim :]
        ours = np.einsum("nhl,hvl->nhv", out[0], value_up).reshape(NODES, -1)
        assert np.linalg.norm(ours - layer.attn) <= FLOAT64_REL_L2 * np.linalg.norm(layer.attn)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_node_gets_the_logits_of_its_own_chain(name: str) -> None:
    model = build(name, seed=3)
    step = random_step(model, seed=4)
    for node in range(NODES):
        context = [*step.prefix.tolist(), *step.tokens[branch(step, node)].tolist()]
        with torch.no_grad():
            chain = model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1].numpy()
        np.testing.assert_allclose(step.logits[node], chain, rtol=0, atol=LOGIT_REL * np.abs(chain).max())


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.dense])
def test_the_oracles_model_gives_the_same_logits(name: str) -> None:
    model = build(name, seed=5)
    step = random_step(model, seed=6)
    weights = {key: value.numpy() for key, value in model.state_dict().items()}
    for node in range(NODES):
        context = np.concatenate([step.prefix, step.tokens[branch(step, node)]])
        logits = mla_model.prefill(weights, model.config.to_dict(), context).logits[-1]
        np.testing.assert_allclose(step.logits[node], logits, rtol=0, atol=LOGIT_REL * np.abs(logits).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_are_captured(dtype: torch.dtype) -> None:
    step = random_step(build("deepseek_v3", seed=7, dtype=dtype), seed=8)
    assert all(layer.q.dtype == np.float32 for layer in step.layers)


def test_sdpa_and_eager_attention_agree() -> None:
    model = build("deepseek_v3", seed=9)
    eager = random_step(model, seed=10)
    model.config._attn_implementation = "sdpa"
    sdpa = random_step(model, seed=10)
    np.testing.assert_allclose(sdpa.logits, eager.logits, rtol=0, atol=LOGIT_REL * np.abs(eager.logits).max())


def test_a_request_without_prefix_and_branches() -> None:
    step = random_step(build("deepseek_v3", seed=11), seed=12, prefix=0, n=1)
    assert step.layers[0].kv.shape == (1, 576)
    made = capture.to_bundle([step], name="root")
    assert made.context.tokens.size == 0


def test_the_model_is_left_as_it_was() -> None:
    model = build("deepseek_v3", seed=13).train()
    random_step(model, seed=14)
    assert model.training
    modules = [model, *model.modules()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def test_hooks_are_removed_when_the_forward_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("deepseek_v3", seed=15)

    def fail(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
    with pytest.raises(RuntimeError):
        random_step(model, seed=16, prefix=0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_ragged_batch_round_trips(tmp_path: Path) -> None:
    model = build("deepseek_v2", seed=17)
    steps = [random_step(model, seed, prefix, n) for seed, prefix, n in ((18, 0, 1), (19, 1, 5), (20, 63, NODES))]
    made = capture.to_bundle(steps, name="ragged", page_size=16)
    bundle.write(tmp_path / "ragged.h5", made)
    read = bundle.read(tmp_path / "ragged.h5")
    assert read.request.prefix_len.tolist() == [0, 1, 63]
    for b, step in enumerate(steps):
        q = bundle.from_bfloat16(read.layers[1].q[read.nodes(b)])
        kv = bundle.from_bfloat16(read.layers[1].kv[read.keys(b)])
        # Half a unit in the last of bfloat16's eight bits.
        np.testing.assert_allclose(q, step.layers[1].q, rtol=2.0**-8)
        np.testing.assert_allclose(kv, step.layers[1].kv, rtol=2.0**-8)


def test_two_captures_give_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for name in ("first", "second"):
        made = capture.to_bundle([random_step(build("deepseek_v3", seed=21), seed=22)], name="same")
        bundle.write(tmp_path / f"{name}.h5", made)
        files.append((tmp_path / f"{name}.h5").read_bytes())
    assert files[0] == files[1]


def test_a_shipped_bundle_is_what_its_model_gives() -> None:
    stored = bundle.read(BUNDLES / "chain_n8.h5")
    assert stored.witness is not None
    model = capture.load_model(exactness.FIXTURES / "tiny_model")
    step = capture.verify_step(
        model, stored.context.tokens.tolist(), stored.tree.tokens.tolist(), stored.tree.parents.tolist()
    )
    scale = np.abs(stored.witness.logits).max()
    np.testing.assert_allclose(step.logits, stored.witness.logits, rtol=0, atol=LOGIT_REL * scale)
    for layer, kept in zip(step.layers, stored.layers, strict=True):
        for ours, bits in ((layer.q, kept.q), (layer.kv, kept.kv)):
            theirs = bundle.from_bfloat16(bits)
            # bfloat16 storage alone: 2^-9 a value, uniformly spread, is 2^-9 / sqrt(3) in L2.
            assert np.linalg.norm(ours - theirs) <= 2.0**-9 * np.linalg.norm(theirs)


@pytest.mark.parametrize("num_nodes", [1, 2, 8, 17])
def test_the_greedy_tree_accepts_its_spine(num_nodes: int) -> None:
    model = build("deepseek_v3", seed=23)
    prefix = np.random.default_rng(24).integers(VOCAB, size=PREFIX).tolist()
    step = capture.verify_step(model, prefix, *capture.greedy_tree(model, prefix, 5, num_nodes))
    assert len(step.tokens) == num_nodes
    best = step.logits.argmax(-1)
    first_children = [step.parents.tolist().index(parent) for parent in sorted(set(step.parents.tolist()) - {-1})]
    assert all(step.tokens[child] == best[step.parents[child]] for child in first_children)


TREE = ([5, 6, 7], [-1, 0, 0])


@pytest.mark.parametrize(
    ("prefix", "tokens", "parents", "argument"),
    [
        ([VOCAB], *TREE, "prefix"),
        ([-1], *TREE, "prefix"),
        ([1], [5, VOCAB, 7], [-1, 0, 0], "tokens"),
        ([1], [], [], "tokens"),
        ([1], list(range(257)), [-1] + [0] * 256, "tokens"),
        ([1], [5, 6], [-1], "parents"),
        ([1], [5, 6], [0, 0], "parents"),
        ([1], [5, 6, 7], [-1, 2, 1], "parents"),
        ([1], [5, 6, 7], [-1, 0, -2], "parents"),
    ],
)
def test_an_impossible_request_is_refused(
    prefix: list[int], tokens: list[int], parents: list[int], argument: str
) -> None:
    with pytest.raises(BundleError) as refused:
        capture.verify_step(build("deepseek_v3", seed=25), prefix, tokens, parents)
    assert refused.value.argument == argument
    assert "\n" not in str(refused.value)


def test_a_model_without_latent_attention_is_refused() -> None:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(BundleError, match="'llama'"):
        capture.verify_step(AutoModelForCausalLM.from_config(config), [1], *TREE)


def test_an_attention_that_may_ignore_the_mask_is_refused() -> None:
    model = build("deepseek_v3", seed=26)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(BundleError, match="tree mask"):
        capture.verify_step(model, [1], *TREE)


def test_an_unknown_cache_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class ExpandedCache(DynamicCache):  # type: ignore[misc]
        """Keys and values per head, as releases before 5 kept them."""

        def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            kept = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            self.layers[layer_idx].keys = kept[0].expand(-1, HEADS, -1, -1)
            return kept

    model = build("deepseek_v3", seed=27)
    # By name: transformers replaces its own entry in sys.modules while it loads.
    monkeypatch.setattr("transformers.DynamicCache", ExpandedCache)
    with pytest.raises(BundleError, match="caches keys and values of shapes"):
        capture.verify_step(model, [], *TREE)


def test_a_model_that_is_not_plain_mla_is_refused() -> None:
    model = build("deepseek_v3", seed=28)
    output = model.model.layers[1].self_attn.o_proj
    output.register_forward_pre_hook(lambda _module, args: (1.01 * args[0],))
    with pytest.raises(BundleError, match="layer 1: absorbed attention"):
        random_step(model, seed=29)


def test_steps_of_two_models_are_refused() -> None:
    steps = [random_step(build(name, seed=30), seed=31) for name in ("deepseek_v3", "kimi_k2_yarn64")]
    with pytest.raises(BundleError) as refused:
        capture.to_bundle(steps, name="mixed")
    assert refused.value.argument == "steps"
    with pytest.raises(BundleError):
        capture.to_bundle([], name="none")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    build("deepseek_v3", seed=32, dtype=torch.float32).save_pretrained(tmp_path / "model")
    (tmp_path / "prompt.txt").write_text("def main() -> None:\n    pass\n")
    return tmp_path


def test_the_command_writes_a_bundle(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        str(model_folder / "model"),
        "--prompt",
        str(model_folder / "prompt.txt"),
        "--out",
        str(model_folder / "out"),
    ]
    assert capture.main([*paths, "--bytes", "--nodes", "9"]) == 0
    written = model_folder / "out" / "prompt.h5"
    assert capsys.readouterr().out.strip() == str(written)
    made = bundle.read(written)
    assert made.request.num_nodes.tolist() == [9]
    assert made.request.prefix_len.tolist() == [len("def main() -> None:\n    pass\n") - 1]
    assert str(model_folder) not in str(dict(made.provenance))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model": "nowhere"}, "MODEL_DIR"),
        ({"prompt": "nowhere.txt"}, "--prompt"),
        ({"out": "prompt.txt/x"}, "--out"),
        ({"nodes": "0"}, "--nodes"),
        ({"nodes": "257"}, "--nodes"),
        ({"name": "Not A Name"}, "name"),
        ({"max-prefix": "-1"}, "--max-prefix"),
    ],
)
def test_the_command_refuses_in_one_line(
    model_folder: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str], word: str
) -> None:
    given = {"model": "model", "prompt": "prompt.txt", "out": "out", "nodes": "3"} | change
    argv = [str(model_folder / given.pop("model")), "--bytes"]
    for name, value in given.items():
        argv += [f"--{name}", str(model_folder / value) if name in ("prompt", "out") else value]
    assert capture.main(argv) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert word in error


def test_the_command_without_a_tokenizer_says_what_to_do(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        str(model_folder / "model"),
        "--prompt",
        str(model_folder / "prompt.txt"),
        "--out",
        str(model_folder / "out"),
    ]
    assert capture.main(paths) == 1
    assert "--bytes" in capsys.readouterr().err
