"""A small speculative decode loop around the ops: what a server does with them, in a few pages.

A round: a drafter proposes candidates, `tree_build` makes a tree of them, the target verifies all nodes in one pass of
`verify_attn_paged` over a paged latent cache, `tree_accept` keeps the longest path that the target agrees with, and
`kv_compact` moves its rows to where they belong. The text is that of plain decoding, greedy and sampled alike.

On the host everything is NumPy; with device "cuda" the same code runs on torch tensors.
"""

from __future__ import annotations

from kdtree_engine.decode.arrays import Arrays, arrays_for
from kdtree_engine.decode.drafters import DflashDrafter, Drafter, NgramDrafter
from kdtree_engine.decode.loop import Decoder, Round
from kdtree_engine.decode.model import MlaModel
from kdtree_engine.decode.weights import read_weights

__all__ = [
    "Arrays",
    "Decoder",
    "DflashDrafter",
    "Drafter",
    "MlaModel",
    "NgramDrafter",
    "Round",
    "arrays_for",
    "read_weights",
]
