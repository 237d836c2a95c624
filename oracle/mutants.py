"""Named wrong answers of verify_attn, each the fault of a public bug report: what a comparator must reject.

All take the oracle's arguments and `prefix_len` [B], the number of keys before each request's nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from oracle.verify_attn import verify_attn

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


class Mutant(Protocol):
    """A wrong verify_attn."""

    def __call__(
        self,
        q: Array,
        kv: Array,
        *,
        sm_scale: float,
        mask: Array,
        kv_len: Array,
        prefix_len: Array,
        d_latent: int = 512,
    ) -> tuple[Array, Array]: ...


MUTANTS: dict[str, Mutant] = {}


def _mutant(function: Mutant) -> Mutant:
    MUTANTS[function.__name__] = function  # type: ignore[attr-defined]
    return function


def _nodes(kv_len: Array, prefix_len: Array, b: int) -> tuple[int, int]:
    """First key column of request b's nodes, and the one behind the last."""
    return int(prefix_len[b]), int(kv_len[b])


@_mutant
def drop_last_visible_key(q: Array, kv: Array, *, mask: Array, **arguments: Any) -> tuple[Array, Array]:
    """The key loop ends one early. (FlashInfer and vLLM: `<` for `<=` at the last key of a row.)"""
    wrong = mask.copy()
    for row in wrong.reshape(-1, wrong.shape[-1]):
        row[np.flatnonzero(row)[-1:]] = 0
    return _call(q, kv, mask=wrong, **arguments)


@_mutant
def ignore_mask(q: Array, kv: Array, *, mask: Array, **arguments: Any) -> tuple[Array, Array]:
    """Every key is visible to every node. (tokenspeed 469: only the key bound was applied, not the row's.)"""
    return _call(q, kv, mask=np.ones_like(mask), **arguments)


@_mutant
def causal_mask(
    q: Array, kv: Array, *, mask: Array, kv_len: Array, prefix_len: Array, **arguments: Any
) -> tuple[Array, Array]:
    """A tree is taken for a chain: a node sees all nodes before it. (FlashInfer 1028: an old mask stayed.)"""
    wrong = mask.copy()
    for b in range(len(wrong)):
        start, stop = _nodes(kv_len, prefix_len, b)
        wrong[b, : stop - start, start:stop] = np.tril(np.ones((stop - start, stop - start), wrong.dtype))
    return _call(q, kv, mask=wrong, kv_len=kv_len, prefix_len=prefix_len, **arguments)


@_mutant
def mask_of_first_request(q: Array, kv: Array, *, mask: Array, **arguments: Any) -> tuple[Array, Array]:
    """Every request reads request 0's mask. (FlashInfer 2201: offsets of later requests in the wrong unit.)"""
    return _call(q, kv, mask=np.broadcast_to(mask[:1], mask.shape), **arguments)


@_mutant
def drop_self(
    q: Array, kv: Array, *, mask: Array, kv_len: Array, prefix_len: Array, **arguments: Any
) -> tuple[Array, Array]:
    """A node does not see itself. (An exclusive instead of an inclusive ancestor mask.)"""
    wrong = mask.copy()
    for b in range(len(wrong)):
        start, stop = _nodes(kv_len, prefix_len, b)
        wrong[b, np.arange(stop - start), np.arange(start, stop)] = 0
    return _call(q, kv, mask=wrong, kv_len=kv_len, prefix_len=prefix_len, **arguments)


@_mutant
def add_sibling(
    q: Array, kv: Array, *, mask: Array, kv_len: Array, prefix_len: Array, **arguments: Any
) -> tuple[Array, Array]:
    """A node also sees the first node outside its branch. (SGLang 9279: a mask row of the wrong width or offset.)"""
    wrong = mask.copy()
    for b in range(len(wrong)):
        start, stop = _nodes(kv_len, prefix_len, b)
        for row in wrong[b, : stop - start]:
            row[start + np.flatnonzero(row[start:stop] == 0)[:1]] = 1
    return _call(q, kv, mask=wrong, kv_len=kv_len, prefix_len=prefix_len, **arguments)


@_mutant
def off_by_one_prefix(q: Array, kv: Array, *, mask: Array, prefix_len: Array, **arguments: Any) -> tuple[Array, Array]:
    """The tree mask begins one key early: P - 1. (vllm-ddtree: lengths from a stale host mirror.)"""
    return _call(q, kv, mask=_shift(mask, prefix_len, -1), prefix_len=prefix_len, **arguments)


@_mutant
def prefix_plus_one(q: Array, kv: Array, *, mask: Array, prefix_len: Array, **arguments: Any) -> tuple[Array, Array]:
    """The tree mask begins one key late: P + 1. (vLLM 26498: lengths still counted rejected tokens.)"""
    return _call(q, kv, mask=_shift(mask, prefix_len, +1), prefix_len=prefix_len, **arguments)


@_mutant
def keys_counted_twice(q: Array, kv: Array, *, kv_len: Array, mask: Array, **arguments: Any) -> tuple[Array, Array]:
    """The nodes' keys come from the pool and again as new ones. (SGLang 27738.)"""
    twice_kv = np.concatenate([kv, kv], axis=1)
    again = mask.copy()
    for b, prefix in enumerate(arguments["prefix_len"]):
        again[b, :, :prefix] = 0
    in_use = np.arange(mask.shape[2]) < kv_len[:, None, None]
    twice = np.concatenate([mask * in_use, again * in_use], axis=2)
    everything = np.full(len(kv), twice.shape[2])
    return _call(q, twice_kv, mask=twice, kv_len=everything, **arguments)


@_mutant
def swapped_heads(q: Array, kv: Array, **arguments: Any) -> tuple[Array, Array]:
    """The first and the last head change places in the output. (A head tile written at the wrong stride.)"""
    out, lse = _call(q, kv, **arguments)
    out[:, :, [0, -1]], lse[:, :, [0, -1]] = out[:, :, [-1, 0]], lse[:, :, [-1, 0]]
    return out, lse


@_mutant
def swapped_slots(q: Array, kv: Array, *, kv_len: Array, prefix_len: Array, **arguments: Any) -> tuple[Array, Array]:
    """The root's and the last node's rows change places. (SGLang 31218: a move indexed by page instead of token.)"""
    wrong = kv.copy()
    for b in range(len(kv)):
        start, stop = _nodes(kv_len, prefix_len, b)
        wrong[b, [start, stop - 1]] = kv[b, [stop - 1, start]]
    return _call(q, wrong, kv_len=kv_len, prefix_len=prefix_len, **arguments)


@_mutant
def base2_lse(q: Array, kv: Array, **arguments: Any) -> tuple[Array, Array]:
    """The lse is a base-2 logarithm. (FlashInfer's convention handed to a natural-log merge.)"""
    out, lse = _call(q, kv, **arguments)
    return out, lse / np.log(2)


@_mutant
def lse_without_maximum(q: Array, kv: Array, **arguments: Any) -> tuple[Array, Array]:
    """The lse lacks the maximum that was taken out of the exponentials. (A merge of splits then weighs them wrong.)"""
    out, lse = _call(q, kv, **arguments)
    return out, lse - _peaks(q, kv, **arguments)


@_mutant
def splits_averaged(q: Array, kv: Array, *, kv_len: Array, **arguments: Any) -> tuple[Array, Array]:
    """Two halves of the keys are merged half and half instead of by their lse. (Split-KV merges.)"""
    middle = kv.shape[1] // 2
    mask = arguments.pop("mask")
    first, second = mask.copy(), mask.copy()
    first[..., middle:], second[..., :middle] = 0, 0
    out_a, lse_a = _call(q, kv, mask=first, kv_len=kv_len, **arguments)
    out_b, lse_b = _call(q, kv, mask=second, kv_len=kv_len, **arguments)
    return (out_a + out_b) / 2, np.logaddexp(lse_a, lse_b)


@_mutant
def scale_without_yarn(q: Array, kv: Array, *, sm_scale: float, **arguments: Any) -> tuple[Array, Array]:
    """The scale lacks yarn's mscale^2. (mobius 548, imp 880, Megatron-LM 1429: 1.59x for a factor of 40.)"""
    return _call(q, kv, sm_scale=sm_scale / 1.59, **arguments)


@_mutant
def scale_of_cached_width(q: Array, kv: Array, *, sm_scale: float, **arguments: Any) -> tuple[Array, Array]:
    """The scale is 576^-0.5, from the cached width, instead of 192^-0.5. (ollama 13893.)"""
    return _call(q, kv, sm_scale=sm_scale * (192 / 576) ** 0.5, **arguments)


@_mutant
def rope_zeroed(q: Array, kv: Array, *, d_latent: int = 512, **arguments: Any) -> tuple[Array, Array]:
    """The rotary part does not enter the scores. (vLLM 53943: a kernel for another rope width.)"""
    wrong = q.copy()
    wrong[..., d_latent:] = 0
    return _call(wrong, kv, d_latent=d_latent, **arguments)


@_mutant
def values_from_the_end(q: Array, kv: Array, *, d_latent: int = 512, **arguments: Any) -> tuple[Array, Array]:
    """The values are the last columns of a row instead of the first. (A row taken as [rope | latent].)"""
    width = kv.shape[-1]
    order = np.roll(np.arange(width), d_latent)
    return _call(q[..., order], kv[..., order], d_latent=d_latent, **arguments)


@_mutant
def stale_output(q: Array, kv: Array, **arguments: Any) -> tuple[Array, Array]:
    """The last query of each request is not written: the buffer still holds an earlier call's. (SGLang 10892.)"""
    out, lse = _call(q, kv, **arguments)
    before, before_lse = _call(-q, kv, **arguments)
    for b, (length, prefix) in enumerate(zip(arguments["kv_len"], arguments["prefix_len"], strict=True)):
        last = int(length - prefix) - 1
        out[b, last], lse[b, last] = before[b, last], before_lse[b, last]
    return out, lse


@_mutant
def bfloat16_softmax(q: Array, kv: Array, **arguments: Any) -> tuple[Array, Array]:
    """Softmax weights are rounded to bfloat16 before they multiply the values. (A bf16 kernel passed off as fp32.)"""
    return _weighted(q, kv, round_weights=_round_bfloat16, **arguments)


@_mutant
def hidden_keys_multiplied(q: Array, kv: Array, **arguments: Any) -> tuple[Array, Array]:
    """Hidden keys get weight 0 but are still multiplied, so a NaN in one spreads. (FlashInfer 942.)"""
    return _weighted(q, kv, multiply_hidden=True, **arguments)


@_mutant
def uniform_when_nothing_visible(q: Array, kv: Array, **arguments: Any) -> tuple[Array, Array]:
    """A row that sees nothing averages all keys: a large negative score in place of -inf. (Automodel 2826.)"""
    out, lse = _call(q, kv, **arguments)
    kv_len, d_latent = arguments["kv_len"], out.shape[-1]
    for b, i in np.argwhere(np.isneginf(lse).all(axis=2)):
        out[b, i] = kv[b, : kv_len[b], :d_latent].mean(axis=0)
    return out, lse


def _call(q: Array, kv: Array, *, prefix_len: Array, **arguments: Any) -> tuple[Array, Array]:
    del prefix_len
    return verify_attn(q, kv, **arguments)


def _shift(mask: Array, prefix_len: Array, by: int) -> Array:
    """The mask of a kernel that takes prefix_len + by for the prefix length; where that is negative, as it is."""
    shifted = np.zeros_like(mask)
    for b, prefix in enumerate(prefix_len.tolist()):
        wrong = max(prefix + by, 0)
        seen = mask[b].any(axis=1)
        shifted[b, seen, :wrong] = 1
        width = mask.shape[2] - max(wrong, prefix)
        shifted[b, :, wrong : wrong + width] = mask[b, :, prefix : prefix + width]
    return shifted


def _weighted(
    q: Array,
    kv: Array,
    *,
    sm_scale: float,
    mask: Array,
    kv_len: Array,
    prefix_len: Array,
    d_latent: int = 512,
    round_weights: Any = lambda weights: weights,
    multiply_hidden: bool = False,
) -> tuple[Array, Array]:
    """verify_attn with the last product spelled out, for the mutants that get it wrong."""
    del prefix_len
    out, lse = verify_attn(q, kv, sm_scale=sm_scale, mask=mask, kv_len=kv_len, d_latent=d_latent)
    for b, i in np.argwhere(np.isfinite(lse).all(axis=2)):
        visible = np.flatnonzero(mask[b, i, : kv_len[b]])
        scores = sm_scale * (q[b, i].astype(np.float64) @ kv[b, visible].T.astype(np.float64))
        weights = np.zeros((q.shape[2], kv.shape[1]))
        weights[:, visible] = round_weights(np.exp(scores - lse[b, i][:, None]))
        used = np.arange(kv.shape[1]) if multiply_hidden else visible
        out[b, i] = weights[:, used] @ kv[b, used, :d_latent].astype(np.float64)
    return out, lse


def _peaks(q: Array, kv: Array, *, sm_scale: float, mask: Array, kv_len: Array, **_: Any) -> Array:
    """The largest score of every row [B, q_len, H]."""
    peaks = np.zeros(q.shape[:3])
    for b in range(len(q)):
        for i in range(q.shape[1]):
            visible = np.flatnonzero(mask[b, i, : kv_len[b]])
            if visible.size:
                scores = sm_scale * (q[b, i].astype(np.float64) @ kv[b, visible].T.astype(np.float64))
                peaks[b, i] = scores.max(axis=1)
    return peaks


def _round_bfloat16(values: Array) -> Array:
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)
