"""Tree-verify attention over a paged latent cache, one query row at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Array = npt.NDArray[Any]


class Request(NamedTuple):
    """One request, gathered: what its nodes ask, what keys there are, who sees which."""

    rows: slice  # its nodes in q
    prefix: Array  # [P, d]
    drafts: Array  # [n, d]
    visible: Array  # bool [n, n], node i sees node j


def verify_attn_paged(
    q: Array,
    kv_pool: Array,
    *,
    sm_scale: float,
    d_latent: int = 512,
    logit_cap: float = 0.0,
    skip_prefix: bool = False,
    skip_draft: bool = False,
    **layout: Any,
) -> tuple[Array, Array]:
    """Attention of q [T, H, d] to rows of kv_pool [slots, d], whose first d_latent columns are also the values.

    `layout` says which rows: see `requests`. bfloat16 comes as uint16 bits, or as floats.
    Gives out [T, H, d_latent] and the natural-log lse [T, H], float64. A row that sees no key has out 0 and lse -inf;
    a row of q that belongs to no request has NaN, since it has no answer. Hidden keys are never touched.
    """
    out = np.full((*q.shape[:2], d_latent), np.nan)
    lse = np.full(q.shape[:2], np.nan)
    for request in requests(q, kv_pool, **layout):
        for i, row in enumerate(range(request.rows.start, request.rows.stop)):
            prefix = request.prefix[:0] if skip_prefix else request.prefix
            drafts = request.drafts[:0] if skip_draft else request.drafts[request.visible[i]]
            keys = np.concatenate([prefix, drafts])
            out[row], lse[row] = attend(floats(q[row]), keys, sm_scale, logit_cap, d_latent)
    return out, lse


def attend(q: Array, keys: Array, sm_scale: float, logit_cap: float, d_latent: int) -> tuple[Array, Array]:
    """All heads of one node q [H, d] over keys [K, d], every one of them visible: out [H, d_latent], lse [H]."""
    if not len(keys):
        return np.zeros((len(q), d_latent)), np.full(len(q), -np.inf)
    scores = sm_scale * (q @ keys.T)
    if logit_cap:
        scores = logit_cap * np.tanh(scores / logit_cap)
    peak = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=1, keepdims=True)
    return (weights / total) @ keys[:, :d_latent], (peak + np.log(total))[:, 0]


def requests(
    q: Array,
    kv_pool: Array,
    *,
    qo_indptr: Array,
    kv_indptr: Array | None = None,
    kv_indices: Array | None = None,
    page_table: Array | None = None,
    kv_lens: Array | None = None,
    page_size: int = 1,
    draft_kv: Array | None = None,
    draft_slots: Array | None = None,
    mask: Array | None = None,
    mask_bits: Array | None = None,
    parents: Array | None = None,
    full_mask: Array | None = None,
    mask_indptr: Array | None = None,
) -> Iterator[Request]:
    """The requests with nodes, in order.

    The nodes of request b are rows qo_indptr[b]..qo_indptr[b+1] of q [T, H, d]. Its prefix is the slots
    kv_indices[kv_indptr[b]..kv_indptr[b+1]], or the first kv_lens[b] tokens of the pages page_table[b]; slot =
    page * page_size + place in the page. Its drafts are the same rows of draft_kv [T, d], or the slots draft_slots [T];
    None of either: there are none, as skip_draft has it. A slot outside the pool is a row of zeros.

    Among its nodes, node i sees node j where one of these says so, whichever is given, and j <= i if none is:
    mask, [n, n] a request, flat, nonzero = visible; mask_bits [T, W], bit j % 64 of word j / 64; parents [T], the
    node's parent (negative: none), and i sees itself and its ancestors; full_mask, [n, P + n] a request, flat, whose
    first P columns do not count. mask_indptr [B + 1] says where a request's cells begin; without it they follow each
    other. Cells behind the end are zero.
    """
    pool = kv_pool.reshape(-1, kv_pool.shape[-1])
    next_cell = 0
    for b in range(len(qo_indptr) - 1):
        rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        n = rows.stop - rows.start
        if n == 0:
            continue
        if kv_indptr is not None and kv_indices is not None:
            slots = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])]
        else:
            assert page_table is not None
            assert kv_lens is not None
            tokens = np.arange(int(kv_lens[b]))
            slots = page_table[b, tokens // page_size].astype(np.int64) * page_size + tokens % page_size
        prefix = _pool_rows(pool, slots)
        if draft_kv is not None:
            drafts = floats(draft_kv[rows])
        else:
            drafts = _pool_rows(pool, np.full(n, -1) if draft_slots is None else draft_slots[rows])

        if mask is not None or full_mask is not None:
            flat, ignored = (mask, 0) if full_mask is None else (full_mask, len(prefix))
            assert flat is not None
            first = next_cell if mask_indptr is None else int(mask_indptr[b])
            next_cell = first + n * (ignored + n)
            visible = np.zeros((n, ignored + n), bool)
            cells = flat.ravel()[first:next_cell]
            visible.ravel()[: len(cells)] = cells != 0
            visible = visible[:, ignored:]
        elif mask_bits is not None:
            visible = np.array([[_bit(words, j) for j in range(n)] for words in mask_bits[rows].tolist()])
        elif parents is not None:
            visible = _lineages(parents[rows].tolist())
        else:
            visible = np.tri(n, dtype=bool)
        yield Request(rows, prefix, drafts, visible)


def floats(values: Array) -> Array:
    """float64 of bfloat16 bits, or of what are floats already."""
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float64)


def _pool_rows(pool: Array, slots: Array) -> Array:
    rows = np.zeros((len(slots), pool.shape[-1]))
    inside = (slots >= 0) & (slots < len(pool))
    rows[inside] = floats(pool[slots[inside]])
    return rows


def _bit(words: list[int], j: int) -> bool:
    return j // 64 < len(words) and words[j // 64] >> j % 64 & 1 == 1


def _lineages(parents: list[int]) -> Array:
    visible = np.zeros((len(parents), len(parents)), bool)
    for node in range(len(parents)):
        ancestor = node
        while ancestor >= 0 and not visible[node, ancestor]:
            visible[node, ancestor] = True
            ancestor = parents[ancestor]
    return visible
