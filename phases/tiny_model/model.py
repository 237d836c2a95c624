"""The target: a two-layer byte-level `DeepseekV3ForCausalLM` with the real MLA geometry."""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from phases.tiny_model.corpus import BOS, EOS, VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path


def config() -> DeepseekV3Config:
    """Return the target's configuration: latent 512, rope 64 and 8 heads, all layers dense."""
    return DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=768,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=192,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=1,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        num_nextn_predict_layers=0,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def rounded(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's parameters as contiguous bfloat16 CPU tensors, tied ones once."""
    return {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in module.named_parameters()}


def save(weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file whole: a reader sees the old file or the new one."""
    temporary = path.with_suffix(".tmp")
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.replace(path)


def build(
    weights: dict[str, torch.Tensor] | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    attention: str = "sdpa",
) -> Any:
    """Build the frozen target in evaluation mode from its bfloat16 weights, upcast to `dtype`."""
    tensors = weights if isinstance(weights, dict) else load_file(weights)
    settings = config()
    settings._attn_implementation = attention
    target = DeepseekV3ForCausalLM(settings).to(dtype)
    missing, unexpected = target.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"weights do not fit the target: missing {missing}, unexpected {unexpected}")
    target.tie_weights()
    return target.to(device).eval().requires_grad_(False)


class Features:
    """Collects the target's hidden states after each decoder layer during its forward pass.

    `take()` returns them concatenated, [batch, tokens, layers * hidden]: what the drafter reads.
    The model's own `hidden_states` output cannot serve, because its last entry is normalised.
    """

    def __init__(self, target: Any) -> None:
        self._outputs: list[torch.Tensor] = [torch.empty(0)] * len(target.model.layers)
        for index, layer in enumerate(target.model.layers):
            layer.register_forward_hook(partial(self._keep, index))

    def _keep(self, index: int, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        self._outputs[index] = output[0] if isinstance(output, tuple) else output

    def take(self) -> torch.Tensor:
        """Return the states of the latest forward pass."""
        return torch.cat(self._outputs, dim=-1)


def forward(target: Any, cache: Any, **inputs: torch.Tensor) -> torch.Tensor:
    """Run the target on top of `cache`, which grows, and return its logits [batch, tokens, V].

    transformers renamed the argument from `past_key_values` to `cache`; the old name warns.
    """
    name = "cache" if "cache" in signature(target.forward).parameters else "past_key_values"
    return target(**inputs, **{name: cache}, use_cache=True).logits
