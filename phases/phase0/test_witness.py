"""The oracle's model against the witness: the logits that transformers computed when the bundle was captured.

The witness expands keys and values per head and never absorbs; the oracle absorbs, in float64. Nothing is shared but
the weights and the tokens, so agreement says that the oracle computes the model and that the capture's tokens, tree
and positions are what the model saw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from oracle import mla_model
from phases import exactness

if TYPE_CHECKING:
    from kdtree_engine.bundle import Bundle

# The witness is float32: each logit is a sum of 512 products behind two layers, whose roundings of 2^-24 behave like a
# random walk of a few dozen steps. 2^-18 of the largest logit is 64 of them; the worst bundle shows 28.
LOGIT_REL = 2.0**-18
# A float64 pass over a long prefix takes seconds; the deepest branches of a tree have the most to get wrong.
MAX_BRANCHES = 2


def branches(bundle: Bundle, request: int) -> list[list[int]]:
    """The deepest paths from the root to a leaf: the tree pass must give each what a plain causal pass gives."""
    parents = bundle.tree.parents[bundle.nodes(request)].tolist()
    paths = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while path[0] != 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    return sorted(paths, key=len)[-MAX_BRANCHES:]


@pytest.fixture
def _float32_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model forms its rotary angles in float32: at position 1500 that is 1e-4 rad, more than all else together."""
    exact = mla_model.rope_angles

    def rounded(config: mla_model.Config, positions: mla_model.Array) -> tuple[mla_model.Array, float]:
        frequencies, factor = exact(config, np.ones(()))
        # The model's frequencies are reciprocals of float32 powers; rounding them once would not give the same bits.
        rounded_frequencies = np.float32(1) / (1 / frequencies).astype(np.float32)
        angles: Any = np.asarray(positions, np.float32)[..., None] * rounded_frequencies
        return angles.astype(np.float64), factor

    monkeypatch.setattr(mla_model, "rope_angles", rounded)


@pytest.mark.usefixtures("_float32_angles")
def test_the_oracle_computes_what_the_model_computed(bundle: Bundle) -> None:
    assert bundle.witness is not None
    model = exactness.load_model(bundle)
    bound = LOGIT_REL * np.abs(bundle.witness.logits).max()
    for b in range(bundle.batch):
        prefix, tokens = bundle.context.tokens[bundle.prefix(b)], bundle.tree.tokens[bundle.nodes(b)]
        witness = bundle.witness.logits[bundle.nodes(b)]
        for path in branches(bundle, b):
            context = np.concatenate([prefix, tokens[path]])
            logits = mla_model.prefill(model.weights, model.config, context).logits[len(prefix) :]
            np.testing.assert_allclose(logits, witness[path], rtol=0, atol=bound, err_msg=f"request {b}, path {path}")
