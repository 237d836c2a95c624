"""The other drafter: a byte n-gram that continues greedily; its trees are deep and narrow."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from phases.tiny_model.corpus import VOCAB_SIZE

if TYPE_CHECKING:
    import numpy.typing as npt

ORDERS = (7, 5, 3, 1)
# Enough of each context to estimate from; a shorter context is asked when there is less.
MIN_COUNT = 2
# Of every token that was not seen: small, so that a seen one always ranks above it.
SMOOTHING = 1e-3


class Ngram:
    """Counts continuations in a text; nothing is precomputed, a context is searched when asked."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    def law(self, context: bytes) -> npt.NDArray[np.float64]:
        """Return the probabilities [VOCAB_SIZE] of the token after `context`."""
        counts: Counter[int] = Counter()
        for order in ORDERS:
            suffix = context[-order:]
            if len(suffix) == order:
                found = re.finditer(re.escape(suffix), self._text)
                ends = (match.end() for match in found)
                counts = Counter(self._text[end] for end in ends if end < len(self._text))
            if counts.total() >= MIN_COUNT:
                break
        weights = np.full(VOCAB_SIZE, SMOOTHING)
        for token, count in counts.items():
            weights[token] += count
        weights /= weights.sum()
        return weights

    def draft(self, context: bytes, depth: int) -> npt.NDArray[np.float64]:
        """Return log-probabilities [depth, VOCAB_SIZE] along the greedy continuation."""
        rows = []
        for _ in range(depth):
            law = self.law(context)
            rows.append(np.log(law))
            context += bytes([int(law[:256].argmax())])
        return np.stack(rows)
