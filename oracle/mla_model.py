"""A DeepseekV3-style dense model in float64, from weights with their Hugging Face names and a config.json dict.

The latent cache row of a token is [latent | rope]: the latent after kv_a_layernorm, the rope key after rotation, its
pairs stored as [first halves | second halves]. A query is absorbed: [q_nope W_UK | rotated q_rope], so that attention
works on cache rows and its output is a latent that W_UV turns into values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from oracle.verify_attn import verify_attn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Config = Mapping[str, Any]
    Weights = Mapping[str, Array]
    # (layer, q [T, H, d], kv [K, d]) -> latent out [T, H, d_latent]
    Attend = Callable[[int, Array, Array], Array]

# transformers builds the two inner norms without passing rms_norm_eps.
INNER_NORM_EPS = 1e-6


class Prefill(NamedTuple):
    """What a causal pass over one request's tokens leaves behind."""

    kv: list[Array]  # per layer [S, d_latent + d_rope]
    logits: Array  # [S, V]


class Inputs(NamedTuple):
    """What verify_forward needs of a verify step; ragged axes are requests one after the other."""

    tokens: Array  # [T] node tokens
    depths: Array  # [T]
    prefix_len: Array  # [B]
    num_nodes: Array  # [B]
    q: Array  # [T, H, d] layer 0's stored queries
    kv: Sequence[Array]  # per layer [K, d] stored rows, each request's prefix and then its nodes


def attention_scale(config: Config) -> float:
    """(nope + rope)^-0.5, times mscale^2 under yarn."""
    scale = float((config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5)
    rope = rope_parameters(config)
    if rope["rope_type"] != "default" and rope.get("mscale_all_dim"):
        scale *= _mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    return scale


def rope_parameters(config: Config) -> dict[str, Any]:
    """Rope settings under the names of transformers 5, from either of its two spellings."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rope


def rope_angles(config: Config, positions: Array) -> tuple[Array, float]:
    """Angles [..., rope/2] of every rotary pair at the given positions, and the factor on cos and sin."""
    dim = config["qk_rope_head_dim"]
    rope = rope_parameters(config)
    pairs = np.arange(0, dim, 2, dtype=np.float64)
    plain = float(rope["rope_theta"]) ** (-pairs / dim)
    factor = 1.0
    if rope["rope_type"] == "yarn":
        plain, factor = _yarn(config, rope, plain)
    elif rope["rope_type"] != "default":
        raise ValueError(f"rope_type: got {rope['rope_type']!r}; expected 'default' or 'yarn'")
    return np.asarray(positions, np.float64)[..., None] * plain, factor


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(config: Config, rope: Mapping[str, Any], plain: Array) -> tuple[Array, float]:
    """Slow pairs are interpolated by `factor`, fast ones kept, with a linear ramp between."""
    dim, theta = int(config["qk_rope_head_dim"]), float(rope["rope_theta"])
    original = float(rope["original_max_position_embeddings"])
    stretch = rope.get("factor") or config["max_position_embeddings"] / original

    def pair_with_turns(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (pair_with_turns(rope.get("beta_fast") or 32), pair_with_turns(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            attention_factor = _mscale(stretch, rope["mscale"]) / _mscale(stretch, rope["mscale_all_dim"])
        else:
            attention_factor = _mscale(stretch, 1.0)
    return plain * (1 - ramp) + plain / stretch * ramp, float(attention_factor)


def rotate(config: Config, x: Array, positions: Array) -> Array:
    """Rotate x [S, ..., rope] as the model stores it; the result's pairs are [first halves | second halves]."""
    angles, factor = rope_angles(config, positions)
    angles = angles.reshape(angles.shape[0], *(1,) * (x.ndim - 2), -1)
    half = x.shape[-1] // 2
    if config.get("rope_interleave", True):
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :half], x[..., half:]
    cos, sin = factor * np.cos(angles), factor * np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    return normed * weight


class Model:
    """Weights in float64 and the pieces of a layer."""

    def __init__(self, weights: Weights, config: Config) -> None:
        self.config = config
        self.weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.num_layers = int(config["num_hidden_layers"])
        self.num_heads = int(config["num_attention_heads"])
        self.d_latent = int(config["kv_lora_rank"])
        self.eps = float(config.get("rms_norm_eps", 1e-6))
        self.nope, self.rope = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
        self.value = int(config["v_head_dim"])

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def embed(self, tokens: Array) -> Array:
        return self.weights["model.embed_tokens.weight"][tokens]

    def absorption(self, layer: int) -> tuple[Array, Array]:
        """W_UK [H, nope, d_latent] and W_UV [H, v, d_latent]."""
        both = self.weights[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        both = both.reshape(self.num_heads, self.nope + self.value, self.d_latent)
        return both[:, : self.nope], both[:, self.nope :]

    def queries(self, layer: int, x: Array, positions: Array) -> Array:
        """Absorbed queries [S, H, d] of normalised hidden states [S, hidden]."""
        name = f"model.layers.{layer}.self_attn"
        if f"{name}.q_proj.weight" in self.weights:
            q = self.linear(f"{name}.q_proj", x)
        else:
            low = self.linear(f"{name}.q_a_proj", x)
            low = rms_norm(low, self.weights[f"{name}.q_a_layernorm.weight"], INNER_NORM_EPS)
            q = self.linear(f"{name}.q_b_proj", low)
        q = q.reshape(len(x), self.num_heads, self.nope + self.rope)
        w_uk, _ = self.absorption(layer)
        latent = np.matmul(q[..., : self.nope].swapaxes(0, 1), w_uk).swapaxes(0, 1)
        return np.concatenate([latent, rotate(self.config, q[..., self.nope :], positions)], axis=-1)

    def rows(self, layer: int, x: Array, positions: Array) -> Array:
        """Latent cache rows [S, d] of normalised hidden states [S, hidden]."""
        name = f"model.layers.{layer}.self_attn"
        both = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        latent = rms_norm(both[:, : self.d_latent], self.weights[f"{name}.kv_a_layernorm.weight"], INNER_NORM_EPS)
        return np.concatenate([latent, rotate(self.config, both[:, self.d_latent :], positions)], axis=-1)

    def values(self, layer: int, out_latent: Array) -> Array:
        """The input of o_proj, [S, H * v], from the attention's latent output [S, H, d_latent]."""
        _, w_uv = self.absorption(layer)
        per_head: Array = np.matmul(out_latent.swapaxes(0, 1), w_uv.swapaxes(1, 2))
        return per_head.swapaxes(0, 1).reshape(len(out_latent), -1)

    def before_attention(self, layer: int, hidden: Array) -> Array:
        return rms_norm(hidden, self.weights[f"model.layers.{layer}.input_layernorm.weight"], self.eps)

    def after_attention(self, layer: int, hidden: Array, out_latent: Array) -> Array:
        """The hidden states behind the layer."""
        name = f"model.layers.{layer}"
        hidden = hidden + self.linear(f"{name}.self_attn.o_proj", self.values(layer, out_latent))
        x = rms_norm(hidden, self.weights[f"{name}.post_attention_layernorm.weight"], self.eps)
        gate = self.linear(f"{name}.mlp.gate_proj", x)
        up = self.linear(f"{name}.mlp.up_proj", x)
        return hidden + self.linear(f"{name}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def logits(self, hidden: Array) -> Array:
        x = rms_norm(hidden, self.weights["model.norm.weight"], self.eps)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return x @ head.T


def prefill(weights: Weights, config: Config, tokens: Array) -> Prefill:
    """A causal pass over one request's tokens [S] from position 0."""
    model = Model(weights, config)
    positions = np.arange(len(tokens))
    hidden = model.embed(tokens)
    causal = np.tril(np.ones((1, len(tokens), len(tokens)), np.uint8))
    cache = []
    for layer in range(model.num_layers):
        x = model.before_attention(layer, hidden)
        cache.append(model.rows(layer, x, positions))
        out, _ = verify_attn(
            model.queries(layer, x, positions)[None],
            cache[layer][None],
            sm_scale=attention_scale(config),
            mask=causal,
            d_latent=model.d_latent,
        )
        hidden = model.after_attention(layer, hidden, out[0])
    return Prefill(cache, model.logits(hidden))


def verify_forward(
    weights: Weights,
    config: Config,
    inputs: Inputs,
    attend: Attend,
    round_inputs: Callable[[Array], Array] = lambda x: x.astype(np.float32),
) -> Array:
    """Logits [T, V] of a verify step in which `attend` is the attention of every layer.

    Layer 0's queries and node rows, and every layer's prefix rows, are the stored ones. In the layers above, queries
    and node rows come from the hidden states and pass through `round_inputs` (to the kernel's input type) first.
    """
    model = Model(weights, config)
    hidden = model.embed(inputs.tokens)
    positions = node_positions(inputs)
    is_node = node_keys(inputs)
    for layer in range(model.num_layers):
        if layer == 0:
            q, kv = inputs.q, inputs.kv[0]
        else:
            x = model.before_attention(layer, hidden)
            q = round_inputs(model.queries(layer, x, positions))
            kv = np.array(inputs.kv[layer], q.dtype)
            kv[is_node] = round_inputs(model.rows(layer, x, positions))
        hidden = model.after_attention(layer, hidden, np.asarray(attend(layer, q, kv), np.float64))
    return model.logits(hidden)


def node_positions(inputs: Inputs) -> Array:
    """Rotary positions of the nodes [T]: the request's prefix length plus the depth."""
    return np.repeat(inputs.prefix_len, inputs.num_nodes) + inputs.depths


def node_keys(inputs: Inputs) -> Array:
    """Which of the keys [K] are nodes."""
    counts = np.stack([inputs.prefix_len, inputs.num_nodes], axis=1).ravel()
    return np.repeat(np.arange(counts.size) % 2 == 1, counts)
