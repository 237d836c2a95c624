"""Drafters: what may come next, as marginals by depth, for every request of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kdtree_engine.decode.model import rms_norm, silu
from kdtree_engine.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kdtree_engine.decode.arrays import Arrays


class Drafter(Protocol):
    """Proposes log-probabilities of the next `depth` tokens."""

    depth: int

    def draft(self, tokens: Sequence[int], states: Any, embedding: Any) -> Any:
        """Log-probabilities float32 [depth, V] of the tokens after `tokens`.

        Args:
            tokens: what a request has so far; the last one is not in the cache yet.
            states: the target's hidden states of all but the last, float32 [len(tokens) - 1, layers * hidden].
            embedding: the target's token embedding [V, hidden], which may also be the drafter's.
        """


class DflashDrafter:
    """A block model: one pass over [last token, mask, mask, ...] with the target's hidden states as further keys.

    Attention within the block goes both ways. Row k of the result is the law of the k-th token after the last one, not
    conditioned on the tokens between. Weights and sizes are those of fixtures/tiny_model.
    """

    def __init__(self, weights: Mapping[str, Any], config: Mapping[str, Any], arrays: Arrays) -> None:
        """Takes float32 NumPy weights.

        Raises:
            DecodeError: a tensor or a size is missing.
        """
        self._arrays = arrays
        try:
            self._block, self._window = int(config["block_size"]), int(config["context_window"])
            self._heads, self._num_layers = int(config["num_heads"]), int(config["num_layers"])
            half = int(config["hidden_size"]) // self._heads // 2
            self._frequencies = float(config["rope_theta"]) ** -(np.arange(half, dtype=np.float32) / half)
            self._weights = {
                name: arrays.array(np.ascontiguousarray(value.T if value.ndim == 2 else value))
                for name, value in weights.items()
            }
            self._mask = self._weights["mask_embedding"][None]
        except KeyError as error:
            raise DecodeError("drafter", f"it has no {error.args[0]}; take the files of one drafter") from None
        self.depth = self._block - 1

    def _w(self, name: str) -> Any:
        return self._weights[f"{name}.weight"]

    def _norm(self, x: Any, name: str) -> Any:
        return rms_norm(self._arrays.xp, x, self._w(name), 1e-6)

    def _split(self, x: Any) -> Any:
        """[tokens, width] as [heads, tokens, head width]."""
        return x.reshape(len(x), self._heads, -1).swapaxes(0, 1)

    def _rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        return self._arrays.xp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def draft(self, tokens: Sequence[int], states: Any, embedding: Any) -> Any:
        """See `Drafter.draft`."""
        xp, start = self._arrays.xp, len(tokens) - 1
        states = states[max(0, start - self._window) :]
        seen = len(states)
        angles = np.arange(start - seen, start + self._block, dtype=np.float32)[:, None] * self._frequencies
        cos, sin = self._arrays.array(np.cos(angles)), self._arrays.array(np.sin(angles))
        context = self._norm(states @ self._w("context_proj"), "context_norm")
        first = embedding[tokens[-1] : tokens[-1] + 1] @ self._w("embed_proj")
        x = xp.concatenate([first, *[self._mask] * self.depth], axis=0)
        for number in range(self._num_layers):
            layer = f"layers.{number}"
            hidden = self._norm(x, f"{layer}.input_norm")
            # Every token of the block sees the whole window and the whole block: there is no mask.
            both = xp.concatenate([context, hidden], axis=0)
            q = self._rotate(self._split(hidden @ self._w(f"{layer}.q_proj")), cos[seen:], sin[seen:])
            k = self._rotate(self._split(both @ self._w(f"{layer}.k_proj")), cos, sin)
            v = self._split(both @ self._w(f"{layer}.v_proj"))
            scores = xp.matmul(q, k.swapaxes(1, 2)) * q.shape[-1] ** -0.5
            weights = xp.exp(scores - xp.amax(scores, axis=-1, keepdims=True))
            out = xp.matmul(weights / weights.sum(axis=-1, keepdims=True), v).swapaxes(0, 1)
            x = x + out.reshape(len(x), -1) @ self._w(f"{layer}.o_proj")
            hidden = self._norm(x, f"{layer}.mlp_norm")
            gate = silu(xp, hidden @ self._w(f"{layer}.gate_proj"))
            x = x + (gate * (hidden @ self._w(f"{layer}.up_proj"))) @ self._w(f"{layer}.down_proj")
        logits = (self._norm(x[1:], "norm") @ self._w("head_proj")) @ embedding.T
        logits = logits - xp.amax(logits, axis=-1, keepdims=True)
        return logits - xp.log(xp.exp(logits).sum(axis=-1, keepdims=True))


class NgramDrafter:
    """A byte n-gram over a text and what the request has so far; rows follow its own greedy continuation.

    The longest of a few orders that was seen often enough gives the law, by its latest occurrences; tokens that did not
    follow one get a little.
    """

    ORDERS = (7, 5, 3, 1)
    LEAST_COUNT = 2
    MOST_COUNT = 64
    SMOOTHING = 1e-3
    WINDOW = 4096  # bytes of the request that are searched

    def __init__(self, text: bytes, vocab_size: int, arrays: Arrays, depth: int = 7) -> None:
        self.depth = depth
        self._text, self._vocab_size, self._arrays = text, vocab_size, arrays

    def law(self, context: bytes, text: bytes) -> Any:
        """Probabilities float64 [V] of the byte after `context`, by counts in `text`."""
        weights = np.full(self._vocab_size, self.SMOOTHING)
        for order in self.ORDERS:
            found = self._after(context[-order:], text) if len(context) >= order else b""
            if len(found) >= self.LEAST_COUNT or order == self.ORDERS[-1]:
                np.add.at(weights, np.frombuffer(found, np.uint8), 1)
                break
        return weights / weights.sum()

    def _after(self, suffix: bytes, text: bytes) -> bytes:
        """The bytes after the latest occurrences of `suffix`."""
        found, end = bytearray(), len(text) - 1
        while len(found) < self.MOST_COUNT and (at := text.rfind(suffix, 0, end)) >= 0:
            found.append(text[at + len(suffix)])
            end = at + len(suffix) - 1
        return bytes(found)

    def draft(self, tokens: Sequence[int], states: Any, embedding: Any) -> Any:
        """See `Drafter.draft`; states and embedding are not looked at."""
        del states, embedding
        context = bytes(token for token in tokens[-self.WINDOW :] if token < 256)
        text = self._text + b"\0" + context
        rows = []
        for _ in range(self.depth):
            law = self.law(context, text)
            rows.append(np.log(law))
            context += bytes([int(law[:256].argmax())])
        return self._arrays.array(np.stack(rows).astype(np.float32))
