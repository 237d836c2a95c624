"""Phase 2: paged kernels against the float64 oracle over shapes that the captured bundles do not have."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine.bundle import to_bfloat16
from kdtree_engine.ops.verify_attn_paged import OUT_ROW_REL_L2
from oracle.verify_attn_paged import verify_attn_paged
from phases.discipline import assert_same_bits
from phases.paged import FORMS, Case, as_floats, problems

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from phases.places import Place

    Array = npt.NDArray[Any]
    Evidence = Callable[..., None]

OPS = ("verify_attn_paged",)

HEADS = [Case((3,), (40,), num_heads) for num_heads in (1, 2, 4, 5, 8, 10, 12, 16, 20, 32, 40, 64, 128)]
NODES = [Case((n,), (37,), 2) for n in (1, 2, 15, 16, 17, 32, 33, 60, 63, 64, 65, 100, 128, 192, 256)]
# Rows of the mask of every number of words, against tiles of keys that begin anywhere in them.
MASKS = [
    Case((n,), (p,), 1, tree="any", form=form)
    for n, form in ((65, "mask"), (127, "full_mask"), (256, "mask_bits"))
    for p in (0, 1, 5, 8, 15, 30)
]
PREFIXES = [Case((5,), (p,), 4) for p in (0, 1, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 127, 200, 300)]
RAGGED = [
    Case((0, 7, 1, 0, 17, 2, 0), (0, 33, 0, 9, 64, 1, 0), 5, tree="any", form="full_mask"),
    Case((64, 1, 33), (3, 150, 16), 8, form="mask_bits", pool_drafts=True),
    Case((3,) * 30, tuple(range(30)), 4, form="parents"),
    Case((0, 0, 0), (0, 5, 0), 4),
    Case((2, 256, 1), (100, 20, 0), 1, tree="any", strided=True),
]
GEOMETRIES = [
    Case((n,), (50,), num_heads, *geometry)
    for geometry in ((512, 0), (256, 64), (256, 32))
    for n, num_heads in ((1, 4), (3, 10), (17, 8))
]
PAGES = [
    Case((9, 0, 17), (70, 4, 300), 4, page_size=page_size, form=form, strided=strided, pool_drafts=strided)
    for page_size, form, strided in (
        (16, "mask", False),
        (32, "parents", True),
        (64, "full_mask", False),
        (128, "mask_bits", True),
        (256, "full_mask", True),
    )
] + [Case((2,), (p,), 4, page_size=16) for p in (0, 1, 15, 16, 17, 32)]
SPLITS = [
    Case((n, 2), (p, 40), num_heads, split_tokens=split)
    for n, num_heads in ((1, 8), (4, 8), (9, 8))
    for p in (130, 257)
    for split in (16, 48, 64, 256, 1024)
] + [
    # More parts than a merge holds at once, in one request and beside another.
    Case((1,), (2200,), 4, split_tokens=16),
    Case((2,), (700,), 4, split_tokens=16),
    Case((1, 3), (2200, 40), 4, split_tokens=16),
]
# Without a split the library chooses: row tiles and parts for one request, for a batch, with and without its hints.
AUTOMATIC = [
    Case((n,) * batch, (p,) * batch, num_heads, hints=hints)
    for n, num_heads in ((1, 8), (3, 8), (17, 8))
    for batch in (1, 3)
    for p in (20, 900)
    for hints in (True, False)
]
CAPS = [
    Case((9,), (70,), 4, logit_cap=cap, split_tokens=split, tree="any")
    for cap, split in ((0.5, 0), (3.0, 0), (30.0, 16))
]
FLOATS = [
    Case((n, 1), (70, 3), num_heads, out_dtype="float32", split_tokens=split)
    for n, num_heads, split in ((1, 5, 0), (7, 4, 0), (17, 8, 0), (17, 8, 32))
]
SKIPS = [
    Case((9, 0, 3), (70, 3, 0), 4, skip=skip, form=form, page_size=page_size)
    for skip in ("prefix", "draft")
    for form, page_size in (("mask", 1), ("full_mask", 16))
]
CASES = [*HEADS, *NODES, *MASKS, *PREFIXES, *RAGGED, *GEOMETRIES, *PAGES, *SPLITS, *AUTOMATIC, *CAPS, *FLOATS, *SKIPS]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(place: Place, kernel_name: str, case: Case, evidence: Evidence) -> None:
    out, lse = place.verify_attn_paged(kernel_name, **case.inputs(), **case.options())
    found, figures = problems((out[case.live], lse[case.live]), case.answer())
    evidence(kernel=kernel_name, **figures)
    assert not found, found


# One question in every layout. The keys meet the kernel in the same order, so its bits must not change.
BATCH = Case((9, 0, 40, 1), (70, 3, 33, 0), 5)
LAYOUTS = [
    *(dataclasses.replace(BATCH, page_size=page_size) for page_size in (16, 32, 64, 128, 256)),
    *(dataclasses.replace(BATCH, int64=(name,)) for name in ("qo_indptr", "kv_indptr", "kv_indices")),
    *(dataclasses.replace(BATCH, page_size=16, int64=(name,)) for name in ("page_table", "kv_lens")),
    dataclasses.replace(BATCH, pool_drafts=True),
    dataclasses.replace(BATCH, pool_drafts=True, int64=("draft_slots",)),
    dataclasses.replace(BATCH, pool_drafts=True, page_size=64, strided=True),
    dataclasses.replace(BATCH, strided=True),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_layouts_give_the_same_bits(place: Place, kernel_name: str, case: Case, evidence: Evidence) -> None:
    plain = place.verify_attn_paged(kernel_name, **BATCH.inputs(), **BATCH.options())
    out, lse = place.verify_attn_paged(kernel_name, **case.inputs(), **case.options())
    live = case.live
    assert_same_bits((out[live], lse[live]), (plain[0][live], plain[1][live]))
    evidence(kernel=kernel_name)


FORMS_OF = {"chain": FORMS, "random": FORMS[1:], "any": ("mask", "mask_bits", "full_mask")}


@pytest.mark.parametrize("nodes", [(9, 0, 33), (65, 1), (200,)], ids=str)
@pytest.mark.parametrize("tree", FORMS_OF)
def test_forms_of_one_tree_give_the_same_bits(
    place: Place, kernel_name: str, tree: str, nodes: tuple[int, ...], evidence: Evidence
) -> None:
    case = Case(nodes, (70, 3, 20)[: len(nodes)], 3, tree=tree, form=FORMS_OF[tree][-1])
    results = []
    for form, strided in ((form, strided) for form in FORMS_OF[tree] for strided in (False, True)):
        variant = dataclasses.replace(case, form=form, strided=strided)
        out, lse = place.verify_attn_paged(kernel_name, **variant.inputs(), **variant.options())
        results.append((out[case.live], lse[case.live]))
    assert not problems(results[0], case.answer())[0]
    for other in results[1:]:
        assert_same_bits(other, results[0])
    evidence(kernel=kernel_name)


def over_prefix(q: Array, keys: Array, page_size: int = 1, **options: Any) -> dict[str, Any]:
    """Arguments for nodes q [n, H, d] of one request over keys [P, d], float32 or bits, without drafts."""
    order = np.random.default_rng(0).permutation(len(keys) // page_size)
    pool = np.empty((len(order), page_size, keys.shape[1]), np.uint16)
    pool[order] = (keys if keys.dtype == np.uint16 else to_bfloat16(keys)).reshape(pool.shape)
    layout: dict[str, Any] = {"kv_indptr": np.array([0, len(keys)], np.int32), "kv_indices": order}
    if page_size > 1:
        layout = {"page_table": order[None], "kv_lens": np.array([len(keys)], np.int32), "page_size": page_size}
    common = {"q": to_bfloat16(q), "kv_pool": pool, "qo_indptr": np.array([0, len(q)], np.int32), "skip_draft": True}
    return {**common, **layout, **options}


@pytest.mark.parametrize("page_size", [1, 64])
def test_every_key_counts_once(place: Place, kernel_name: str, page_size: int, evidence: Evidence) -> None:
    """Closed form at the longest context: with q = 0 every key weighs 1 / P and lse = ln P.

    Column c holds the keys' c-th binary digit, so a key that is dropped or counted twice anywhere shows.
    """
    prefix = 262_144
    keys = np.zeros((prefix, 576), np.uint16)
    keys[:, :18] = to_bfloat16(np.arange(prefix)[:, None] >> np.arange(18) & 1)
    keys[:, 18] = to_bfloat16(np.ones(1))
    arguments = over_prefix(np.zeros((1, 2, 576), np.float32), keys, page_size, sm_scale=1.0, out_dtype="float32")
    out, lse = place.verify_attn_paged(kernel_name, **arguments)
    np.testing.assert_allclose(out[0, :, :18], 0.5, rtol=1e-6)
    np.testing.assert_allclose(out[0, :, 18], 1.0, rtol=1e-6)
    assert (out[0, :, 19:] == 0.0).all()
    np.testing.assert_allclose(lse, math.log(prefix), rtol=1e-6)
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("gap", [0.0, 1.0, -3.0, 40.0])
def test_two_keys(place: Place, kernel_name: str, gap: float, evidence: Evidence) -> None:
    """Closed form: the weight of the first of two keys is the logistic function of their score gap."""
    q, keys = np.zeros((1, 1, 576), np.float32), np.zeros((2, 576), np.float32)
    q[..., 575] = 1.0  # the last rotary element makes the scores, the first latent elements tell the keys apart
    keys[0, 575], keys[0, 0], keys[1, 1] = gap * 4.0, 1.0, 1.0
    out, lse = place.verify_attn_paged(kernel_name, **over_prefix(q, keys, sm_scale=0.25, out_dtype="float32"))
    weight = 1.0 / (1.0 + math.exp(-gap))
    np.testing.assert_allclose(out[0, 0, :2], [weight, 1.0 - weight], rtol=OUT_ROW_REL_L2, atol=1e-12)
    np.testing.assert_allclose(lse[0, 0], math.log1p(math.exp(-gap)) + gap, rtol=1e-6, atol=1e-6)
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_huge_scores_pick_one_key(place: Place, kernel_name: str, sign: float, evidence: Evidence) -> None:
    """Scores far beyond exp's range still give the best key's own value, exactly."""
    q, keys = np.full((2, 3, 576), sign, np.float32), np.zeros((100, 576), np.float32)
    keys[:, 512:] = np.arange(100.0)[:, None] * 8.0
    keys[:, 7] = np.arange(100.0)
    out, lse = place.verify_attn_paged(kernel_name, **over_prefix(q, keys, sm_scale=1.0))
    best = 99 if sign > 0 else 0
    assert (as_floats(out)[..., 7] == np.float32(best)).all()
    np.testing.assert_allclose(lse, sign * best * 513.0, rtol=1e-6)
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("split_tokens", [0, 16])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30, 3e37])
def test_values_of_any_size(place: Place, kernel_name: str, size: float, split_tokens: int, evidence: Evidence) -> None:
    """Values near either end of float32's range, from keys whose scores come from the rotary part alone."""
    rng = np.random.default_rng(20260702)
    q, keys = np.zeros((2, 9, 576), np.float32), rng.standard_normal((40, 576), np.float32)
    q[..., 512:] = rng.standard_normal((2, 9, 64))
    keys[:, :512] *= np.float32(size)
    keys[:20, :512:2] *= np.float32(2.0**-20)  # columns of very different size in one row
    arguments = over_prefix(q, keys, sm_scale=0.2)
    right = verify_attn_paged(**arguments)
    if split_tokens:
        arguments |= {"split_tokens": split_tokens, "max_kv_len": 40}
    found, figures = problems(place.verify_attn_paged(kernel_name, **arguments), right)
    evidence(kernel=kernel_name, **figures)
    assert not found, found


@pytest.mark.parametrize("split_tokens", [0, 16])
def test_rising_scores(place: Place, kernel_name: str, split_tokens: int, evidence: Evidence) -> None:
    """Scores that rise along the prefix, each head by another step: the keys that count come last.

    Whatever a kernel takes as reference for its weights was set by keys that count for little.
    """
    rng = np.random.default_rng(20260701)
    q, keys = np.zeros((1, 64, 576), np.float32), rng.standard_normal((40, 576), np.float32)
    q[0, np.arange(64), 512 + np.arange(64)] = 1.0  # head h reads its scores from rotary element h
    keys[:, 512:] = np.arange(40.0)[:, None] * np.linspace(0.02, 2.0, 64)
    arguments = over_prefix(q, keys, sm_scale=1.0)
    right = verify_attn_paged(**arguments)
    if split_tokens:
        arguments |= {"split_tokens": split_tokens, "max_kv_len": 40}
    found, figures = problems(place.verify_attn_paged(kernel_name, **arguments), right)
    evidence(kernel=kernel_name, **figures)
    assert not found, found
