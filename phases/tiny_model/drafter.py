"""The drafter: a DFlash-like block model that predicts seven bytes in one forward pass.

A block is [bonus token, MASK x 7]. Attention inside the block is bidirectional; the target's hidden
states of the tokens before the block enter every layer as further keys and values. Token embedding
and output head are the target's. Row k of the output is the marginal of the k-th byte after the
bonus token, not conditioned on the bytes between.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of the drafter; `context_window` is how many tokens before the block it can see."""

    target_hidden_size: int = 512
    target_layers: int = 2
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 2
    num_heads: int = 4
    block_size: int = 8
    context_window: int = 256
    rope_theta: float = 10000.0


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply rotary embedding to x [..., tokens, head_dim] at positions [..., tokens]."""
    half = x.shape[-1] // 2
    exponent = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = positions[..., None].float() * theta**-exponent
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class DrafterLayer(nn.Module):  # type: ignore[misc]
    """Attention over [context, block] followed by SwiGLU, both with pre-normalisation."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads, self.rope_theta = config.num_heads, config.rope_theta
        self.input_norm = nn.RMSNorm(width, eps=1e-6)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.gate_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, x_position: Tensor, context_position: Tensor, mask: Tensor) -> Tensor:
        hidden = self.input_norm(x)
        both = torch.cat((context, hidden), dim=1)
        position = torch.cat((context_position, x_position), dim=1)[:, None]
        q = rotate(self._heads(self.q_proj(hidden)), x_position[:, None], self.rope_theta)
        k = rotate(self._heads(self.k_proj(both)), position, self.rope_theta)
        v = self._heads(self.v_proj(both))
        out = F.scaled_dot_product_attention(q, k.to(q.dtype), v, attn_mask=mask)
        x = x + self.o_proj(out.transpose(1, 2).flatten(2))
        hidden = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Drafter(nn.Module):  # type: ignore[misc]
    """The block drafter; see the module's docstring."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.mask_embedding = nn.Parameter(torch.randn(width) * 0.02)
        self.embed_proj = nn.Linear(config.target_hidden_size, width, bias=False)
        self.context_proj = nn.Linear(config.target_hidden_size * config.target_layers, width, bias=False)
        self.context_norm = nn.RMSNorm(width, eps=1e-6)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head_proj = nn.Linear(width, config.target_hidden_size, bias=False)

    def forward(
        self,
        features: Tensor,
        feature_position: Tensor,
        bonus: Tensor,
        anchor: Tensor,
        embedding: Tensor,
    ) -> Tensor:
        """Draft one block per anchor.

        Args:
            features: [B, S, target_layers * target_hidden_size], the target's hidden states.
            feature_position: int64 [B, S], their positions.
            bonus: int64 [B, A], the last committed token, whose hidden state is not known yet.
            anchor: int64 [B, A], its position; the block sees features before it.
            embedding: [V, target_hidden_size], the target's tied embedding.

        Returns:
            Logits [B, A, block_size - 1, V].
        """
        batch, anchors = anchor.shape
        size, width = self.config.block_size, self.config.hidden_size
        first = self.embed_proj(F.embedding(bonus, embedding))[:, :, None]
        rest = self.mask_embedding.to(first.dtype).expand(batch, anchors, size - 1, width)
        x = torch.cat((first, rest), dim=2).flatten(1, 2).float()
        offset = torch.arange(size, device=anchor.device)
        position = (anchor[:, :, None] + offset).flatten(1)

        distance = anchor.repeat_interleave(size, 1)[:, :, None] - feature_position[:, None, :]
        sees_context = (distance > 0) & (distance <= self.config.context_window)
        block = torch.arange(anchors, device=anchor.device).repeat_interleave(size)
        sees_block = (block[:, None] == block[None, :]).expand(batch, -1, -1)
        mask = torch.cat((sees_context, sees_block), dim=2)[:, None]

        context = self.context_norm(self.context_proj(features).float())
        for layer in self.layers:
            x = layer(x, context, position, feature_position, mask)
        x = self.norm(x.unflatten(1, (anchors, size))[:, :, 1:])
        return F.linear(self.head_proj(x), embedding)

    def draft(self, features: Tensor, bonus: int, start: int, embedding: Tensor) -> Tensor:
        """Return log-probabilities [block_size - 1, V] after `start` committed tokens and `bonus`.

        Args:
            features: [start, target_layers * target_hidden_size] of the committed tokens.
            bonus: the token at position `start`.
            start: number of tokens in the target's cache.
            embedding: [V, target_hidden_size], the target's tied embedding.
        """
        window = features[max(0, start - self.config.context_window) : start]
        device = embedding.device
        logits = self(
            window[None],
            torch.arange(start - len(window), start, device=device)[None],
            torch.tensor([[bonus]], device=device),
            torch.tensor([[start]], device=device),
            embedding,
        )
        return logits[0, 0].float().log_softmax(-1)


def build(weights: dict[str, Tensor] | Path, config: DrafterConfig | Path, *, device: str = "cpu") -> Drafter:
    """Build the frozen float32 drafter from its bfloat16 weights and its configuration."""
    tensors = weights if isinstance(weights, dict) else load_file(weights)
    if not isinstance(config, DrafterConfig):
        config = DrafterConfig(**json.loads(config.read_text()))
    drafter = Drafter(config)
    drafter.load_state_dict(tensors)
    drafter.float().to(device).eval().requires_grad_(False)
    return drafter


def config_json(config: DrafterConfig) -> str:
    """Return the text of `drafter.json`."""
    return json.dumps(asdict(config), indent=2) + "\n"
