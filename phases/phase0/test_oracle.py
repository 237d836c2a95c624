"""The oracle against closed forms, against 40-digit arithmetic, and its model against attention without absorption."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle import mla_model
from oracle.verify_attn import verify_attn
from phases import synthetic
from phases.seeded_weights import normal, seeded_weights, splitmix64

D_LATENT, D_ROPE = 4, 2


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def keys_with_scores(scores: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """One query, and keys that score as given at sm_scale 1: the first rope column carries the score."""
    kv = draw(1, 1, len(scores), D_LATENT + D_ROPE)
    q = np.zeros((1, 1, 1, D_LATENT + D_ROPE))
    q[..., D_LATENT] = 1
    kv[0, :, D_LATENT] = scores
    return q, kv


def test_one_key_gives_its_latent_and_its_score() -> None:
    q, kv = draw(2, 1, 1, 3, D_LATENT + D_ROPE), draw(3, 1, 1, D_LATENT + D_ROPE)
    out, lse = verify_attn(q, kv, sm_scale=0.3, d_latent=D_LATENT)
    np.testing.assert_array_equal(out[0, 0], np.broadcast_to(kv[0, 0, :D_LATENT], (3, D_LATENT)))
    np.testing.assert_allclose(lse[0, 0], 0.3 * q[0, 0] @ kv[0, 0], rtol=1e-14)


@pytest.mark.parametrize("gap", [0.0, 0.5, 3.0, 40.0])
def test_two_keys_weigh_by_the_logistic_of_their_gap(gap: float) -> None:
    q, kv = keys_with_scores([0.0, gap])
    out, lse = verify_attn(q, kv, sm_scale=1.0, d_latent=D_LATENT)
    second = 1 / (1 + math.exp(-gap))
    np.testing.assert_allclose(
        out[0, 0, 0], (1 - second) * kv[0, 0, :D_LATENT] + second * kv[0, 1, :D_LATENT], rtol=1e-13
    )
    assert lse[0, 0, 0] == pytest.approx(gap + math.log1p(math.exp(-gap)), rel=1e-14)


def test_equal_scores_average() -> None:
    q, kv = keys_with_scores([0.7] * 5)
    out, lse = verify_attn(q, kv, sm_scale=1.0, d_latent=D_LATENT)
    np.testing.assert_allclose(out[0, 0, 0], kv[0, :, :D_LATENT].mean(axis=0), rtol=1e-13)
    assert lse[0, 0, 0] == pytest.approx(0.7 + math.log(5), rel=1e-14)


def test_equal_keys_give_that_key() -> None:
    kv = np.repeat(draw(4, 1, 1, D_LATENT + D_ROPE), 7, axis=1)
    out, _ = verify_attn(draw(5, 1, 2, 2, D_LATENT + D_ROPE), kv, sm_scale=0.5, d_latent=D_LATENT)
    np.testing.assert_allclose(out, np.broadcast_to(kv[0, 0, :D_LATENT], out.shape), rtol=1e-14)


@given(st.floats(-500, 500), st.integers(0, 1000))
def test_a_shift_of_all_scores_moves_only_the_lse(shift: float, seed: int) -> None:
    scores = draw(seed, 4).tolist()
    q, kv = keys_with_scores(scores)
    kv[0, :, D_LATENT + 1] = 1
    out, lse = verify_attn(q, kv, sm_scale=1.0, d_latent=D_LATENT)
    q[..., D_LATENT + 1] = shift
    shifted_out, shifted_lse = verify_attn(q, kv, sm_scale=1.0, d_latent=D_LATENT)
    # Adding a shift of 500 to a score of 1 drops its last 2^-44 or so.
    np.testing.assert_allclose(shifted_out, out, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(shifted_lse - shift, lse, atol=1e-12)


@given(st.permutations(range(6)))
def test_order_of_keys_does_not_matter(order: list[int]) -> None:
    q, kv = draw(6, 1, 2, 2, D_LATENT + D_ROPE), draw(7, 1, 6, D_LATENT + D_ROPE)
    mask = np.array([[[1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 1, 1]]], np.uint8)
    out, lse = verify_attn(q, kv, sm_scale=1.0, mask=mask, d_latent=D_LATENT)
    again, lse_again = verify_attn(q, kv[:, order], sm_scale=1.0, mask=mask[:, :, order], d_latent=D_LATENT)
    np.testing.assert_allclose(again, out, rtol=1e-12)
    np.testing.assert_allclose(lse_again, lse, rtol=1e-12)


def test_a_row_that_sees_nothing_is_zero_and_minus_infinity() -> None:
    q, kv = draw(8, 2, 3, 2, D_LATENT + D_ROPE), draw(9, 2, 4, D_LATENT + D_ROPE)
    mask = np.ones((2, 3, 4), np.uint8)
    mask[0, 1] = 0
    out, lse = verify_attn(q, kv, sm_scale=1.0, mask=mask, kv_len=np.array([4, 0]), d_latent=D_LATENT)
    for row in (out[0, 1], out[1]):
        np.testing.assert_array_equal(row, 0)
    for row in (lse[0, 1], lse[1]):
        np.testing.assert_array_equal(row, -np.inf)
    assert np.isfinite(lse[0, [0, 2]]).all()


def test_keys_in_use_are_clamped_to_the_width() -> None:
    q, kv = draw(10, 2, 1, 1, D_LATENT + D_ROPE), draw(11, 2, 4, D_LATENT + D_ROPE)
    out, _ = verify_attn(q, kv, sm_scale=1.0, kv_len=np.array([-3, 99]), d_latent=D_LATENT)
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_array_equal(out[1], verify_attn(q, kv, sm_scale=1.0, d_latent=D_LATENT)[0][1])


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_hidden_keys_have_no_influence(poison: float) -> None:
    q, kv = draw(12, 1, 2, 2, D_LATENT + D_ROPE), draw(13, 1, 5, D_LATENT + D_ROPE)
    mask = np.array([[[1, 0, 1, 0, 1], [1, 0, 0, 0, 1]]], np.uint8)
    clean = verify_attn(q, kv, sm_scale=1.0, mask=mask, kv_len=np.array([4]), d_latent=D_LATENT)
    kv[0, [1, 3, 4]] = poison
    poisoned = verify_attn(q, kv, sm_scale=1.0, mask=mask, kv_len=np.array([4]), d_latent=D_LATENT)
    for left, right in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(left, right)


def exact_row(q: list[float], keys: list[list[float]], scale: float) -> tuple[list[float], float]:
    """One row in 40-digit decimal arithmetic, element by element."""
    with localcontext() as context:
        context.prec = 40
        scores = [
            Decimal(scale) * sum((Decimal(a) * Decimal(b) for a, b in zip(q, key, strict=True)), Decimal(0))
            for key in keys
        ]
        weights = [score.exp() for score in scores]
        total = sum(weights, Decimal(0))
        out = [
            float(sum((w * Decimal(key[c]) for w, key in zip(weights, keys, strict=True)), Decimal(0)) / total)
            for c in range(D_LATENT)
        ]
        return out, float(total.ln())


@pytest.mark.parametrize("seed", range(5))
def test_against_decimal_arithmetic(seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, kv = 3 * rng.standard_normal((2, 3, 2, 6)), 2 * rng.standard_normal((2, 7, 6))
    mask = (rng.random((2, 3, 7)) < 0.6).astype(np.uint8)
    mask[:, :, 0] = 1
    kv_len = np.array([7, 5])
    out, lse = verify_attn(q, kv, sm_scale=0.8, mask=mask, kv_len=kv_len, d_latent=D_LATENT)
    for b, i, h in np.ndindex(2, 3, 2):
        seen = [j for j in range(kv_len[b]) if mask[b, i, j]]
        right_out, right_lse = exact_row(q[b, i, h].tolist(), kv[b, seen].tolist(), 0.8)
        np.testing.assert_allclose(out[b, i, h], right_out, rtol=1e-12, atol=1e-13)
        assert lse[b, i, h] == pytest.approx(right_lse, rel=1e-13)


# The scales of published models: (nope, rope, yarn factor, mscale_all_dim) and what they come to.
@pytest.mark.parametrize(
    ("nope", "factor", "all_dim", "scale"),
    [(128, 40, 0.707, 0.114721387), (128, 40, 1.0, 0.135233779), (128, 64, 1.0, 0.144679626), (192, 1, 0, 0.0625)],
)
def test_scale_of_published_models(nope: int, factor: float, all_dim: float, scale: float) -> None:
    yarn = {"type": "yarn", "factor": factor, "mscale_all_dim": all_dim}
    config = {"qk_nope_head_dim": nope, "qk_rope_head_dim": 64, "rope_scaling": yarn if factor > 1 else None}
    assert mla_model.attention_scale(config) == pytest.approx(scale, rel=1e-8)


def model_config(**changes: Any) -> dict[str, Any]:
    return synthetic.config(num_heads=3, d_latent=24, d_rope=8, num_layers=2) | changes


YARN = {
    "type": "yarn",
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "plain": {},
    "yarn": {"rope_scaling": YARN},
    "no q_lora, halves, tied": {"q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_rotation_keeps_lengths_and_only_the_distance_counts(changes: dict[str, Any]) -> None:
    config = model_config(**changes)
    q, k = draw(14, 1, 8), draw(15, 1, 8)
    products = [
        (mla_model.rotate(config, q, np.array([p])) * mla_model.rotate(config, k, np.array([p - 5]))).sum()
        for p in (5, 17, 300)
    ]
    np.testing.assert_allclose(products, products[0], rtol=1e-10)
    np.testing.assert_allclose(np.linalg.norm(mla_model.rotate(config, q, np.array([9]))), np.linalg.norm(q))


def expanded_logits(weights: dict[str, np.ndarray], config: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """The same model the other way: keys and values expanded per head, one query at a time, nothing absorbed."""
    model = mla_model.Model(weights, config)
    heads, nope, rope, value = model.num_heads, model.nope, model.rope, model.value
    positions = np.arange(len(tokens))
    hidden = model.embed(tokens)
    for layer in range(model.num_layers):
        name = f"model.layers.{layer}.self_attn"
        x = model.before_attention(layer, hidden)
        if config["q_lora_rank"] is None:
            q = x @ weights[f"{name}.q_proj.weight"].T
        else:
            low = x @ weights[f"{name}.q_a_proj.weight"].T
            low = low / np.sqrt((low**2).mean(-1, keepdims=True) + 1e-6) * weights[f"{name}.q_a_layernorm.weight"]
            q = low @ weights[f"{name}.q_b_proj.weight"].T
        q = q.reshape(-1, heads, nope + rope)
        q_rope = mla_model.rotate(config, q[..., nope:], positions)
        rows = model.rows(layer, x, positions)
        expanded = (rows[:, : model.d_latent] @ weights[f"{name}.kv_b_proj.weight"].T).reshape(-1, heads, nope + value)
        outputs = np.zeros((len(tokens), heads, value))
        for i, h in np.ndindex(len(tokens), heads):
            scores = expanded[: i + 1, h, :nope] @ q[i, h, :nope] + rows[: i + 1, model.d_latent :] @ q_rope[i, h]
            weight = np.exp(mla_model.attention_scale(config) * scores)
            outputs[i, h] = weight @ expanded[: i + 1, h, nope:] / weight.sum()
        hidden = hidden + outputs.reshape(len(tokens), -1) @ weights[f"{name}.o_proj.weight"].T
        mlp = f"model.layers.{layer}.mlp"
        x = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6)
        x = x * weights[f"model.layers.{layer}.post_attention_layernorm.weight"]
        gate = x @ weights[f"{mlp}.gate_proj.weight"].T
        silu = gate / (1 + np.exp(-gate))
        hidden = hidden + (silu * (x @ weights[f"{mlp}.up_proj.weight"].T)) @ weights[f"{mlp}.down_proj.weight"].T
    logits: np.ndarray = model.logits(hidden)
    return logits


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_absorbed_model_equals_the_expanded_one(changes: dict[str, Any]) -> None:
    config = model_config(**changes)
    weights = {name: value.astype(np.float64) for name, value in seeded_weights(config, 3).items()}
    tokens = np.random.default_rng(0).integers(0, 64, 12)
    np.testing.assert_allclose(
        mla_model.prefill(weights, config, tokens).logits,
        expanded_logits(weights, config, tokens),
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize("prefix", [0, 1, 6])
def test_every_branch_of_a_verify_step_equals_a_chain(prefix: int) -> None:
    """A node's logits in the tree are those of its own branch, run as plain text."""
    config = model_config()
    weights = seeded_weights(config, 4)
    model = mla_model.Model(weights, config)
    rng = np.random.default_rng(prefix)
    context, tokens = rng.integers(0, 64, prefix), rng.integers(0, 64, 6)
    parents, depths = [-1, 0, 0, 1, 1, 2], np.array([0, 1, 1, 2, 2, 2])
    branches = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]]
    mask = np.zeros((1, 6, prefix + 6), np.uint8)
    mask[:, :, :prefix] = 1
    for node, branch in enumerate(branches):
        assert parents[node] == (branch[-2] if len(branch) > 1 else -1)
        mask[0, node, [prefix + i for i in branch]] = 1
    positions = prefix + depths
    rows = mla_model.prefill(weights, config, context).kv if prefix else [np.zeros((0, 32))] * 2
    x = model.before_attention(0, model.embed(tokens))
    kv = [np.concatenate([rows[0], model.rows(0, x, positions)]), np.concatenate([rows[1], np.zeros((6, 32))])]
    inputs = mla_model.Inputs(tokens, depths, np.array([prefix]), np.array([6]), model.queries(0, x, positions), kv)

    def attend(_layer: int, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        scale = mla_model.attention_scale(config)
        out, _ = verify_attn(q[None], kv[None], sm_scale=scale, mask=mask, d_latent=24)
        return np.squeeze(out, axis=0)

    logits = mla_model.verify_forward(weights, config, inputs, attend, lambda x: x)
    for node, branch in enumerate(branches):
        chain = mla_model.prefill(weights, config, np.concatenate([context, tokens[branch]])).logits[-1]
        np.testing.assert_allclose(logits[node], chain, rtol=1e-10, atol=1e-12)


def test_other_rope_types_are_refused() -> None:
    with pytest.raises(ValueError, match="rope_type: got 'longrope'"):
        mla_model.rope_angles(model_config(rope_scaling={"type": "longrope"}), np.arange(2))


def test_seeded_numbers_are_the_published_generator() -> None:
    # The first outputs of splitmix64 from state 0, as in its reference implementation.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(np.arange(1, 4, dtype=np.uint64)).tolist() == expected


def test_seeded_numbers_are_normal_and_of_their_place() -> None:
    values = normal(7, "w", (400, 500))
    # 200,000 draws: the mean is within 5 / sqrt(200000), the variance within 5 * sqrt(2 / 200000).
    assert abs(values.mean()) < 0.0112
    assert abs(values.var() - 1) < 0.0159
    assert np.abs(values).max() < 6
    np.testing.assert_array_equal(normal(7, "w", (10,)), values.ravel()[:10])
    assert (normal(8, "w", (10,)) != values.ravel()[:10]).any()
    assert (normal(7, "v", (10,)) != values.ravel()[:10]).any()


def test_seeded_weights_fit_bfloat16_and_keep_their_bits() -> None:
    weights = seeded_weights(model_config(), 5)
    for value in weights.values():
        assert value.dtype == np.float32
        assert not (value.view(np.uint32) & 0xFFFF).any()
    # Recorded once: a change here breaks every stored bundle with model "seeded".
    first = weights["model.layers.1.self_attn.q_b_proj.weight"].ravel()[:4].tolist()
    assert first == [-0.64453125, -0.52734375, 1.2890625, -0.142578125]
