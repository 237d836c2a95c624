"""Weights from a seed: the same bits on every machine and NumPy, so a bundle of a large geometry needs no weights file.

Normal numbers come from a hash of (seed, tensor name, element) by integer arithmetic alone: the sum of twelve 16-bit
pieces, which has standard deviation 2^16 and tails that end at six of them. No logarithm or cosine is involved, whose
last bit differs between C libraries.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from kdtree_engine.bundle import from_bfloat16, to_bfloat16

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    Array = npt.NDArray[Any]

_PIECES = 12


def splitmix64(state: Array) -> Array:
    """The output function of the splitmix64 generator on uint64 values."""
    with np.errstate(over="ignore"):
        z = state * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def normal(seed: int, name: str, shape: tuple[int, ...]) -> Array:
    """Standard normal numbers, float64, a function of their seed, name and place alone."""
    size = int(np.prod(shape))
    stream = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        counters = np.uint64(stream) + np.arange(1, 3 * size + 1, dtype=np.uint64)
    pieces = splitmix64(counters).astype("<u8", copy=False).view("<u2").reshape(size, _PIECES)
    sums = pieces.sum(axis=1, dtype=np.int64)
    # 2 * 12 * 32767.5 is an integer: the centred sum is exact.
    centred: Array = (2 * sums - _PIECES * 65535) / 2.0**17
    return centred.reshape(shape)


def seeded_weights(config: Mapping[str, Any], seed: int) -> dict[str, Array]:
    """Weights of a dense model by their Hugging Face names, float32 values that bfloat16 holds exactly.

    Matrices have standard deviation gain * fan_in^-0.5, norms are 1 + 0.1 N(0, 1), embeddings N(0, 1).
    `config` is a config.json dict; its "seeded_gain" maps a module name ("q_b_proj") to that gain, 1 if absent.
    """
    gains = config.get("seeded_gain", {})
    weights = {}
    for name, shape in shapes(config).items():
        module = name.split(".")[-2]
        values = normal(seed, name, shape)
        if module.endswith("norm"):
            values = 1.0 + 0.1 * values
        elif module == "embed_tokens":
            values = gains.get(module, 1.0) * values
        else:
            values = (gains.get(module, 1.0) / np.sqrt(float(shape[1]))) * values
        weights[name] = from_bfloat16(to_bfloat16(values.astype(np.float32)))
    return weights


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of a dense model."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    low = config.get("q_lora_rank")
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        if low is None:
            result[f"{attention}.q_proj.weight"] = (heads * (nope + rope), hidden)
        else:
            result[f"{attention}.q_a_proj.weight"] = (low, hidden)
            result[f"{attention}.q_a_layernorm.weight"] = (low,)
            result[f"{attention}.q_b_proj.weight"] = (heads * (nope + rope), low)
        result[f"{attention}.kv_a_proj_with_mqa.weight"] = (latent + rope, hidden)
        result[f"{attention}.kv_a_layernorm.weight"] = (latent,)
        result[f"{attention}.kv_b_proj.weight"] = (heads * (nope + value), latent)
        result[f"{attention}.o_proj.weight"] = (hidden, heads * value)
        result[f"{mlp}.gate_proj.weight"] = (inner, hidden)
        result[f"{mlp}.up_proj.weight"] = (inner, hidden)
        result[f"{mlp}.down_proj.weight"] = (hidden, inner)
        result[f"model.layers.{layer}.input_layernorm.weight"] = (hidden,)
        result[f"model.layers.{layer}.post_attention_layernorm.weight"] = (hidden,)
    result["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        result["lm_head.weight"] = (vocab, hidden)
    return result
