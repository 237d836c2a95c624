"""Plain decoding in float64, a token at a time: what every drafter, budget and batch has to reproduce.

Queries and cache rows pass through `round_inputs`, as they do on their way into a kernel; nothing else is rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from oracle.mla_model import attention_scale
from oracle.verify_attn import verify_attn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from oracle.mla_model import Model

    Array = npt.NDArray[Any]
    Rounding = Callable[[Array], Array]


class Text(NamedTuple):
    """A decoded continuation."""

    tokens: list[int]
    logits: Array  # [len(tokens), V], what each token was chosen by


class Cache:
    """One request's rows in every layer."""

    def __init__(self, model: Model, round_inputs: Rounding) -> None:
        self._model, self._round = model, round_inputs
        self._rows: list[Array] = [np.zeros((0, 0))] * model.num_layers
        self._length = 0

    def extend(self, tokens: Sequence[int]) -> Array:
        """Logits [len(tokens), V] after each of further tokens."""
        model, new = self._model, len(tokens)
        positions = np.arange(self._length, self._length + new)
        hidden = model.embed(np.array(tokens))
        mask = np.tril(np.ones((1, new, self._length + new), np.uint8), self._length)
        for layer in range(model.num_layers):
            x = model.before_attention(layer, hidden)
            rows = self._round(model.rows(layer, x, positions))
            kept = self._rows[layer]
            self._rows[layer] = np.concatenate([kept, rows]) if self._length else rows
            out, _ = verify_attn(
                self._round(model.queries(layer, x, positions))[None],
                self._rows[layer][None],
                sm_scale=attention_scale(model.config),
                mask=mask,
                d_latent=model.d_latent,
            )
            hidden = model.after_attention(layer, hidden, out[0])
        self._length += new
        return model.logits(hidden)


def greedy(model: Model, prompt: Sequence[int], count: int, round_inputs: Rounding) -> Text:
    """`count` tokens, each the one of the largest logit, of equals the lowest."""
    cache = Cache(model, round_inputs)
    logits = [cache.extend(prompt)[-1]]
    tokens = [int(logits[0].argmax())]
    while len(tokens) < count:
        logits.append(cache.extend(tokens[-1:])[0])
        tokens.append(int(logits[-1].argmax()))
    return Text(tokens, np.stack(logits))


def teacher_forced(model: Model, prompt: Sequence[int], tokens: Sequence[int], round_inputs: Rounding) -> Array:
    """Logits [len(tokens), V] that plain decoding would have before each of `tokens`, all given."""
    return Cache(model, round_inputs).extend([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
