"""Named wrong answers, each the fault of a public bug report or of a kernel in the making: what a gate must reject.

MUTANTS are of verify_attn and take its oracle's arguments and `prefix_len` [B], the number of keys before each
request's nodes. PAGED_MUTANTS are of verify_attn_paged and take its oracle's arguments; one that is about a layout or
an option that is not in use gives the right answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from oracle.verify_attn import verify_attn
from oracle.verify_attn_paged import Request, attend, floats, requests, verify_attn_paged

if TYPE_CHECKING:
    from collections.abc import Callable

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


class PagedMutant(Protocol):
    """A wrong verify_attn_paged."""

    def __call__(self, q: Array, kv_pool: Array, *, sm_scale: float, **arguments: Any) -> tuple[Array, Array]: ...


PAGED_MUTANTS: dict[str, PagedMutant] = {}


def _paged_mutant(function: PagedMutant) -> PagedMutant:
    PAGED_MUTANTS[function.__name__] = function  # type: ignore[attr-defined]
    return function


@_paged_mutant
def prefix_lacks_its_last_key(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """The prefix loop ends one early. (FlashInfer and vLLM: `<` for `<=`.)"""
    return _edited(q, kv_pool, lambda r: r._replace(prefix=r.prefix[:-1]), **arguments)


@_paged_mutant
def prefix_takes_the_root_as_well(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """The root counts in the prefix and among the drafts. (vLLM 26498: lengths one too long.)"""
    return _edited(q, kv_pool, lambda r: r._replace(prefix=np.concatenate([r.prefix, r.drafts[:1]])), **arguments)


@_paged_mutant
def last_partial_tile_dropped(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Only whole tiles of 16 prefix keys are walked. (A loop over P / 16 tiles without the rest.)"""
    return _edited(q, kv_pool, lambda r: r._replace(prefix=r.prefix[: len(r.prefix) // 16 * 16]), **arguments)


@_paged_mutant
def last_partial_page_dropped(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Only whole pages are walked. (A page count rounded down.)"""
    size = arguments.get("page_size", 1)
    return _edited(q, kv_pool, lambda r: r._replace(prefix=r.prefix[: len(r.prefix) // size * size]), **arguments)


@_paged_mutant
def pages_taken_for_slots(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Page numbers are taken for slots and divided again. (SGLang 31218: pages and tokens mixed up.)"""
    if "page_table" in arguments:
        arguments["page_table"] = arguments["page_table"] // arguments["page_size"]
    return verify_attn_paged(q, kv_pool, **arguments)


@_paged_mutant
def page_entries_in_reverse(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """A token's place is counted from the page's end: only a partial page shows it. (Wrong page arithmetic.)"""
    if "page_table" in arguments:
        kv_pool = kv_pool[:, ::-1]
        slots = arguments.get("draft_slots")
        if slots is not None:
            size = arguments["page_size"]
            arguments["draft_slots"] = np.where(slots < 0, slots, slots // size * size + size - 1 - slots % size)
    return verify_attn_paged(q, kv_pool, **arguments)


@_paged_mutant
def wide_indices_read_as_narrow(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Every second of int64 slots is read as 0. (SGLang hands int64 in one mode and int32 in the other.)"""
    indices = arguments.get("kv_indices")
    if indices is not None and indices.dtype == np.int64:
        arguments["kv_indices"] = indices.view(np.int32)[: len(indices)]
    return verify_attn_paged(q, kv_pool, **arguments)


@_paged_mutant
def slot_outside_read_as_zero(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """A slot outside the pool is clamped into it. (FlashInfer 2883: index -1 in padded rows.)"""
    for name in ("kv_indices", "draft_slots"):
        if arguments.get(name) is not None:
            arguments[name] = np.clip(arguments[name], 0, kv_pool.reshape(-1, kv_pool.shape[-1]).shape[0] - 1)
    return verify_attn_paged(q, kv_pool, **arguments)


@_paged_mutant
def drafts_of_the_first_request(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Draft rows are read from the start of the batch. (FlashInfer 2201: an offset of later requests forgotten.)"""
    firsts = [request.drafts for request in requests(q, kv_pool, **_layout(arguments))]
    everyones = np.concatenate(firsts) if firsts else np.zeros((0, kv_pool.shape[-1]))
    return _edited(q, kv_pool, lambda r: r._replace(drafts=everyones[: len(r.drafts)]), **arguments)


@_paged_mutant
def drafts_counted_twice(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """The drafts' rows come from the pool and again as new ones. (SGLang 27738.)"""

    def edit(r: Request) -> Request:
        return r._replace(
            drafts=np.concatenate([r.drafts, r.drafts]), visible=np.concatenate([r.visible, r.visible], axis=1)
        )

    return _edited(q, kv_pool, edit, **arguments)


@_paged_mutant
def tree_transposed(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Descendants are seen instead of ancestors. (A mask read by columns.)"""
    return _edited(q, kv_pool, lambda r: r._replace(visible=r.visible.T), **arguments)


@_paged_mutant
def tree_taken_for_a_chain(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """A node sees all nodes before it. (FlashInfer 1028: an old mask stayed.)"""
    return _edited(q, kv_pool, lambda r: r._replace(visible=np.tri(len(r.visible), dtype=bool)), **arguments)


@_paged_mutant
def later_nodes_never_seen(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Cells right of the diagonal are dropped, so that nodes must be in order. (SGLang 39593.)"""
    return _edited(q, kv_pool, lambda r: r._replace(visible=np.tril(r.visible)), **arguments)


@_paged_mutant
def nodes_past_64_never_seen(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Only the first word of a row's bits counts. (SGLang 12349: 64 draft tokens fail, 60 work.)"""
    return _edited(q, kv_pool, lambda r: r._replace(visible=r.visible & (np.arange(len(r.visible)) < 64)), **arguments)


@_paged_mutant
def mask_of_the_first_rows(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Every request reads request 0's cells. (FlashInfer 2201: offsets of later requests in the wrong unit.)"""
    arguments["mask_indptr"] = np.zeros(len(arguments["qo_indptr"]), np.int64)
    return verify_attn_paged(q, kv_pool, **arguments)


@_paged_mutant
def mask_indptr_ignored(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Requests' cells are taken to follow each other. (SGLang 9687: a mask buffer larger than what is in it.)"""
    return verify_attn_paged(q, kv_pool, **arguments | {"mask_indptr": None})


@_paged_mutant
def parent_instead_of_lineage(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Of its ancestors a node sees only the parent. (The walk up the parents stops after a step.)"""
    own = arguments.get("parents")

    def edit(r: Request) -> Request:
        if own is None:
            return r
        nodes = np.arange(len(r.visible))
        return r._replace(visible=r.visible & ((nodes == own[r.rows][:, None]) | (nodes == nodes[:, None])))

    return _edited(q, kv_pool, edit, **arguments)


@_paged_mutant
def full_mask_taken_for_a_small_one(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Rows of n cells are read where they have P + n. (SGLang 9279: a mask row of the wrong width.)"""
    if arguments.get("full_mask") is not None:
        arguments["mask"] = arguments.pop("full_mask")
    return verify_attn_paged(q, kv_pool, **arguments)


@_paged_mutant
def prefix_columns_applied(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """The full mask hides prefix keys too. (SGLang 3731: the prefix columns are not part of the contract.)"""
    full = arguments.get("full_mask")
    if full is None:
        return verify_attn_paged(q, kv_pool, **arguments)
    # As one mask over [prefix | drafts], all of them taken for drafts.
    indptr = arguments.get("mask_indptr")
    begin = 0

    def edit(r: Request) -> Request:
        nonlocal begin
        n, width = len(r.drafts), len(r.prefix) + len(r.drafts)
        if indptr is not None:
            begin = int(indptr[list(arguments["qo_indptr"]).index(r.rows.start)])
        cells = full[begin : begin + n * width].reshape(n, width) != 0
        begin += n * width
        return Request(r.rows, r.prefix[:0], np.concatenate([r.prefix, r.drafts]), cells)

    return _edited(q, kv_pool, edit, **arguments)


@_paged_mutant
def skipped_prefix_shortens_the_mask(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Without its prefix, a full mask is read with rows of n cells. (A length of 0 that went everywhere.)"""
    if arguments.get("skip_prefix") and arguments.get("full_mask") is not None:
        arguments["mask"] = arguments.pop("full_mask")
    return verify_attn_paged(q, kv_pool, **arguments)


@_paged_mutant
def skipped_drafts_are_there(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """The drafts count although they are to be left out. (Merged with another rank's, they count twice.)"""
    return verify_attn_paged(q, kv_pool, **arguments | {"skip_draft": False})


@_paged_mutant
def token_stride_of_a_dense_q(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """q is read as if it were dense. (SGLang hands a view.)"""
    dense = np.empty(q.shape, q.dtype).strides
    return verify_attn_paged(np.lib.stride_tricks.as_strided(q, q.shape, dense), kv_pool, **arguments)


@_paged_mutant
def rows_shifted_in_the_last_tile(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """In a request's last, partial tile of 16 rows every (node, head) row holds its neighbour's. (A tail of heads.)"""
    out, lse = verify_attn_paged(q, kv_pool, **arguments)
    for r in requests(q, kv_pool, **_layout(arguments)):
        count = len(r.drafts) * q.shape[1]
        tail = slice(count // 16 * 16, count)
        for values in (out[r.rows].reshape(count, -1), lse[r.rows].reshape(count, 1)):
            values[tail] = np.roll(values[tail], 1, axis=0)
    return out, lse


@_paged_mutant
def last_row_not_written(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """The last node of a request keeps what an earlier call left. (SGLang 10892.)"""
    out, lse = verify_attn_paged(q, kv_pool, **arguments)
    before, before_lse = verify_attn_paged(-floats(q), kv_pool, **arguments)
    for r in requests(q, kv_pool, **_layout(arguments)):
        out[r.rows.stop - 1], lse[r.rows.stop - 1] = before[r.rows.stop - 1], before_lse[r.rows.stop - 1]
    return out, lse


@_paged_mutant
def lse_in_base_two(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """The lse is a base-2 logarithm. (FlashInfer's convention handed to a natural-log merge.)"""
    out, lse = verify_attn_paged(q, kv_pool, **arguments)
    return out, lse / np.log(2)


@_paged_mutant
def powers_of_two(q: Array, kv_pool: Array, *, sm_scale: float, **arguments: Any) -> tuple[Array, Array]:
    """Weights are 2^s instead of e^s. (An exp2 without log2(e) in its scale.)"""
    return verify_attn_paged(q, kv_pool, sm_scale=sm_scale * np.log(2), **arguments)


@_paged_mutant
def scale_lacks_yarn(q: Array, kv_pool: Array, *, sm_scale: float, **arguments: Any) -> tuple[Array, Array]:
    """The scale lacks yarn's mscale^2. (mobius 548, imp 880, Megatron-LM 1429: 1.59x for a factor of 40.)"""
    return verify_attn_paged(q, kv_pool, sm_scale=sm_scale / 1.59, **arguments)


@_paged_mutant
def cap_left_out(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Scores are not capped. (An argument that is taken and not used.)"""
    return verify_attn_paged(q, kv_pool, **arguments | {"logit_cap": 0.0})


@_paged_mutant
def cap_before_scale(q: Array, kv_pool: Array, *, sm_scale: float, **arguments: Any) -> tuple[Array, Array]:
    """The cap is applied to the product before it is scaled. (Two steps in the wrong order.)"""
    cap = arguments.get("logit_cap", 0.0) / sm_scale
    return verify_attn_paged(q, kv_pool, sm_scale=sm_scale, **arguments | {"logit_cap": cap * sm_scale**2})


@_paged_mutant
def rope_left_out(q: Array, kv_pool: Array, *, d_latent: int = 512, **arguments: Any) -> tuple[Array, Array]:
    """The rotary part does not enter the scores. (vLLM 53943: a kernel for another rope width.)"""
    wrong = floats(q)
    wrong[..., d_latent:] = 0
    return verify_attn_paged(wrong, kv_pool, d_latent=d_latent, **arguments)


@_paged_mutant
def rope_taken_for_values(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """The values are the last columns of a row instead of the first. (A row taken as [rope | latent].)"""
    d_latent = arguments.get("d_latent", 512)

    def answer(row: Array, keys: Array, _hidden: Array, **scale: Any) -> tuple[Array, Array]:
        out, lse = attend(row, keys, **scale | {"d_latent": keys.shape[1]})
        return out[:, -d_latent:], lse

    return _edited(q, kv_pool, answer=answer, **arguments)


@_paged_mutant
def hidden_drafts_multiplied(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Hidden drafts get weight 0 but are still multiplied, so a NaN in one spreads. (FlashInfer 942.)"""

    def answer(row: Array, keys: Array, hidden: Array, **scale: Any) -> tuple[Array, Array]:
        out, lse = attend(row, keys, **scale)
        return out + (0 * hidden).sum(axis=0)[: out.shape[1]], lse

    return _edited(q, kv_pool, answer=answer, **arguments)


@_paged_mutant
def blind_rows_average(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """A row that sees nothing averages its drafts: a large negative score in place of -inf. (Automodel 2826.)"""

    def answer(row: Array, keys: Array, hidden: Array, **scale: Any) -> tuple[Array, Array]:
        if len(keys) or not len(hidden):
            return attend(row, keys, **scale)
        return attend(0 * row, hidden, **scale)[0], np.full(len(row), -np.inf)

    return _edited(q, kv_pool, answer=answer, **arguments)


@_paged_mutant
def halves_averaged(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """Two halves of the keys are merged half and half instead of by their lse. (Split-KV merges.)"""

    def answer(row: Array, keys: Array, _hidden: Array, **scale: Any) -> tuple[Array, Array]:
        if len(keys) < 2:
            return attend(row, keys, **scale)
        middle = len(keys) // 2
        (left, left_lse), (right, right_lse) = attend(row, keys[:middle], **scale), attend(row, keys[middle:], **scale)
        return (left + right) / 2, np.logaddexp(left_lse, right_lse)

    return _edited(q, kv_pool, answer=answer, **arguments)


@_paged_mutant
def running_sum_in_bfloat16(q: Array, kv_pool: Array, **arguments: Any) -> tuple[Array, Array]:
    """The output is rounded to bfloat16 after every tile of 16 keys. (An accumulator of the output's type.)"""

    def answer(row: Array, keys: Array, _hidden: Array, **scale: Any) -> tuple[Array, Array]:
        out, lse = attend(row, keys[:16], **scale)
        for first in range(16, len(keys), 16):
            more, more_lse = attend(row, keys[first : first + 16], **scale)
            total = np.logaddexp(lse, more_lse)
            out = _round_bfloat16(out * np.exp(lse - total)[:, None] + more * np.exp(more_lse - total)[:, None])
            lse = total
        return out, lse

    return _edited(q, kv_pool, answer=answer, **arguments)


def _layout(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that say where keys lie and who sees them."""
    others = ("sm_scale", "d_latent", "logit_cap", "skip_prefix", "skip_draft")
    return {name: value for name, value in arguments.items() if name not in others}


def _attend_to_visible(row: Array, keys: Array, _hidden: Array, **scale: Any) -> tuple[Array, Array]:
    return attend(row, keys, **scale)


def _edited(
    q: Array,
    kv_pool: Array,
    edit: Callable[[Request], Request] = lambda request: request,
    *,
    answer: Callable[..., tuple[Array, Array]] = _attend_to_visible,
    **arguments: Any,
) -> tuple[Array, Array]:
    """verify_attn_paged with every request changed, or with another answer(q row, keys, hidden drafts) to a node."""
    d_latent = arguments.get("d_latent", 512)
    scale = {"sm_scale": arguments["sm_scale"], "logit_cap": arguments.get("logit_cap", 0.0), "d_latent": d_latent}
    out, lse = np.full((*q.shape[:2], d_latent), np.nan), np.full(q.shape[:2], np.nan)
    for request in map(edit, requests(q, kv_pool, **_layout(arguments))):
        prefix = request.prefix[:0] if arguments.get("skip_prefix") else request.prefix
        drafts = request.drafts[:0] if arguments.get("skip_draft") else request.drafts
        visible = request.visible[:, : len(drafts)]
        for i, row in enumerate(range(request.rows.start, request.rows.stop)):
            keys = np.concatenate([prefix, drafts[visible[i]]])
            out[row], lse[row] = answer(floats(q[row]), keys, drafts[~visible[i]], **scale)
    return out, lse
