"""A dense DeepSeek-V3-style target in float32, from weights with their Hugging Face names, and a paged latent cache.

Attention is absorbed: a query is [q_nope W_UK | rotated q_rope], a cache row [latent | rotated rope], and the latent
output of attention becomes values by W_UV. Queries and rows are rounded to bfloat16 for the kernel, nothing else is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kdtree_engine.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kdtree_engine.decode.arrays import Arrays

INNER_NORM_EPS = 1e-6  # transformers builds the two inner norms without rms_norm_eps


def rms_norm(xp: Any, x: Any, weight: Any, eps: float) -> Any:
    """x [..., width] / sqrt(mean(x^2) + eps) * weight."""
    return x / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def silu(xp: Any, x: Any) -> Any:
    """x / (1 + exp(-x)); exp may overflow, the quotient is then 0."""
    return x / (1 + xp.exp(-x.clip(min=-80)))


class MlaModel:
    """The target: `forward` gives logits and hidden states of any set of nodes.

    Attributes:
        arrays: where its tensors are.
        num_layers, num_heads, d_latent, d_rope, vocab_size, max_positions: its sizes.
        sm_scale: of attention, (nope + rope)^-0.5.
    """

    def __init__(self, weights: Mapping[str, Any], config: Mapping[str, Any], arrays: Arrays) -> None:
        """Takes float32 NumPy weights.

        Raises:
            DecodeError: a model of another kind: with experts, biases, or a rope that is not plain and interleaved.
        """
        self._check(weights, config)
        self.arrays = arrays
        self.num_layers, self.num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        self.d_latent, self.d_rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        self.vocab_size, self.max_positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
        self.sm_scale = float((config["qk_nope_head_dim"] + self.d_rope) ** -0.5)
        self._nope, self._value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
        self._eps = float(config.get("rms_norm_eps", 1e-6))
        put = arrays.array
        self.embedding = put(weights["model.embed_tokens.weight"])
        self._head = put(weights["lm_head.weight"]) if "lm_head.weight" in weights else self.embedding
        self._norm = put(weights["model.norm.weight"])
        self._layers = [self._layer(weights, f"model.layers.{layer}") for layer in range(self.num_layers)]
        theta = float((config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta", 10000.0)))
        angles = np.arange(self.max_positions)[:, None] * theta ** (-np.arange(0, self.d_rope, 2) / self.d_rope)
        self._cos, self._sin = (put(table.astype(np.float32)) for table in (np.cos(angles), np.sin(angles)))

    @staticmethod
    def _check(weights: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
        if rope.get("rope_type", rope.get("type", "default")) != "default" or not config.get("rope_interleave", True):
            raise DecodeError("model", "its rope is scaled or not interleaved, expected a plain one; take another")
        if any(".experts." in name or name.endswith(".bias") for name in weights):
            raise DecodeError("model", "it has experts or biases, expected dense layers; take another model")

    def _layer(self, weights: Mapping[str, Any], name: str) -> dict[str, Any]:
        """The layer's tensors by short names, matrices as [in, out]."""
        put = self.arrays.array
        layer = {}
        try:
            low = f"{name}.self_attn.q_a_proj.weight" in weights
            queries = ("q_a_proj", "q_b_proj", "q_a_layernorm") if low else ("q_proj",)
            attention = (*queries, "kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj")
            names = [*(f"self_attn.{short}" for short in attention), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
            for short in (*names, "input_layernorm", "post_attention_layernorm"):
                layer[short.rpartition(".")[2]] = put(np.ascontiguousarray(weights[f"{name}.{short}.weight"].T))
            both = weights[f"{name}.self_attn.kv_b_proj.weight"]
        except KeyError as error:
            raise DecodeError("model", f"it has no tensor {error.args[0]}; take the weights of its config") from None
        both = both.reshape(self.num_heads, self._nope + self._value, self.d_latent)
        layer["w_uk"] = put(np.ascontiguousarray(both[:, : self._nope]))
        layer["w_uv"] = put(np.ascontiguousarray(both[:, self._nope :].swapaxes(1, 2)))
        return layer

    def _rotate(self, x: Any, positions: Any) -> Any:
        """x [T, ..., rope] as the model stores it, rotated; pairs as [first halves | second halves]."""
        cos, sin = self._cos[positions], self._sin[positions]
        if x.ndim == 3:
            cos, sin = cos[:, None], sin[:, None]
        first, second = x[..., 0::2], x[..., 1::2]
        return self.arrays.xp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _queries(self, layer: dict[str, Any], x: Any, positions: Any) -> Any:
        """Absorbed queries, bfloat16 [T, H, d_latent + d_rope]."""
        xp = self.arrays.xp
        if "q_a_proj" in layer:
            q = rms_norm(xp, x @ layer["q_a_proj"], layer["q_a_layernorm"], INNER_NORM_EPS) @ layer["q_b_proj"]
        else:
            q = x @ layer["q_proj"]
        q = q.reshape(len(x), self.num_heads, self._nope + self.d_rope)
        latent = xp.matmul(q[..., : self._nope].swapaxes(0, 1), layer["w_uk"]).swapaxes(0, 1)
        rope = self._rotate(q[..., self._nope :], positions)
        return self.arrays.bfloat16(xp.concatenate([latent, rope], axis=-1))

    def _rows(self, layer: dict[str, Any], x: Any, positions: Any) -> Any:
        """Cache rows, bfloat16 [T, d_latent + d_rope]."""
        both = x @ layer["kv_a_proj_with_mqa"]
        latent = rms_norm(self.arrays.xp, both[:, : self.d_latent], layer["kv_a_layernorm"], INNER_NORM_EPS)
        rope = self._rotate(both[:, self.d_latent :], positions)
        return self.arrays.bfloat16(self.arrays.xp.concatenate([latent, rope], axis=-1))

    def forward(self, tokens: Any, positions: Any, attend: Callable[[int, Any, Any], Any]) -> tuple[Any, Any]:
        """Logits [T, V] and the hidden states behind every layer [T, layers * hidden] of nodes.

        Args:
            tokens: int64 [T].
            positions: int64 [T].
            attend: (layer, q bfloat16 [T, H, d], rows bfloat16 [T, d]) -> latent output float32 [T, H, d_latent];
                it keeps the rows.
        """
        xp = self.arrays.xp
        hidden, states = self.embedding[tokens], []
        for number, layer in enumerate(self._layers):
            x = rms_norm(xp, hidden, layer["input_layernorm"], self._eps)
            out = attend(number, self._queries(layer, x, positions), self._rows(layer, x, positions))
            values = xp.matmul(out.swapaxes(0, 1), layer["w_uv"]).swapaxes(0, 1).reshape(len(x), -1)
            hidden = hidden + values @ layer["o_proj"]
            x = rms_norm(xp, hidden, layer["post_attention_layernorm"], self._eps)
            hidden = hidden + (silu(xp, x @ layer["gate_proj"]) * (x @ layer["up_proj"])) @ layer["down_proj"]
            states.append(hidden)
        logits = rms_norm(xp, hidden, self._norm, self._eps) @ self._head.T
        return logits, xp.concatenate(states, axis=-1)
