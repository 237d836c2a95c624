"""Greedy decoding with tree verification on the transformers model.

One round: the drafter proposes, a tree is built, the target verifies all nodes in one forward pass
under a tree mask, the greedy walk accepts a path, and the cache keeps the rows of that path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache

from oracle.tree_accept import tree_accept
from oracle.tree_build import tree_build
from phases.tiny_model.model import forward

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from phases.tiny_model.drafter import Drafter
    from phases.tiny_model.model import Features


@dataclass(frozen=True)
class Decoded:
    """Tokens produced, and how many each verification round committed."""

    tokens: list[int]
    round_sizes: list[int]


def best_of(rows: npt.NDArray[Any], rank: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Return the `rank` best of log-probabilities [L, V] and their tokens, [L, rank] each; of a tie the lower token."""
    ids = np.argsort(-rows, axis=1, kind="stable")[:, :rank]
    return np.take_along_axis(rows, ids, axis=1).astype(np.float32), ids.astype(np.int32)


def additive_mask(visibility: npt.NDArray[np.uint8], prefix: int, like: Tensor) -> Tensor:
    """Return the mask [1, 1, n, prefix + n], `like` in dtype and device: 0 where visible, else the lowest number."""
    hidden = torch.from_numpy(np.pad(visibility == 0, ((0, 0), (prefix, 0)))).to(like.device)
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, torch.finfo(like.dtype).min)[None, None]


def keep_rows(cache: Any, rows: list[int]) -> None:
    """Gather the cache's token rows of every layer in place."""
    for layer in cache.layers:
        index = torch.tensor(rows, device=layer.keys.device)
        layer.keys = layer.keys.index_select(-2, index)
        layer.values = layer.values.index_select(-2, index)


def greedy(target: Any, prompt: list[int], count: int) -> list[int]:
    """Decode `count` tokens one at a time, each the argmax of the target's logits."""
    cache = DynamicCache(config=target.config)
    tokens, device = list(prompt), target.device
    step = torch.tensor([tokens], device=device)
    while len(tokens) < len(prompt) + count:
        logits = forward(target, cache, input_ids=step)
        tokens.append(int(logits[0, -1].argmax()))
        step = torch.tensor([tokens[-1:]], device=device)
    return tokens[len(prompt) :]


def speculate(
    target: Any,
    features: Features,
    drafter: Drafter,
    prompt: list[int],
    count: int,
    *,
    budget: int,
    width: int,
) -> Decoded:
    """Decode at least `count` tokens by draft trees; the result is cut to `count` tokens.

    Args:
        target: the frozen transformers model.
        features: the collector attached to `target`.
        drafter: proposes the trees.
        prompt: at least one token.
        count: tokens to produce.
        budget: nodes of a tree without its root.
        width: candidates a depth may use; 1 gives a chain.
    """
    device, embedding = target.device, target.model.embed_tokens.weight
    cache = DynamicCache(config=target.config)
    logits = forward(target, cache, input_ids=torch.tensor([prompt], device=device))
    states = features.take()[0]
    produced, round_sizes = [int(logits[0, -1].argmax())], []
    while len(produced) < count:
        start = states.shape[0]
        rows = drafter.draft(states, produced[-1], start, embedding).cpu().numpy()
        tree = tree_build(*best_of(rows, width), budget, produced[-1])
        logits = forward(
            target,
            cache,
            input_ids=torch.from_numpy(tree.tokens).long().to(device)[None],
            attention_mask=additive_mask(tree.visibility, start, embedding),
            position_ids=torch.from_numpy(tree.depths).long().to(device)[None] + start,
        )[0]
        nodes = features.take()[0]
        choices = logits.argmax(-1).tolist()
        path, _ = tree_accept(tree.tokens.tolist(), tree.parents.tolist(), choices)
        keep_rows(cache, [*range(start), *(start + node for node in path)])
        states = torch.cat((states, nodes[path]))
        produced += [choices[node] for node in path]
        round_sizes.append(len(path))
    return Decoded(produced[:count], round_sizes)
