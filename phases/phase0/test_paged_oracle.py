"""The paged oracle: equal to the dense one, which is tested against closed forms, and to itself in every layout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from oracle.verify_attn import verify_attn
from oracle.verify_attn_paged import verify_attn_paged
from phases import synthetic
from phases.paged import Case, behind_the_dense_interface

SMALL: dict[str, Any] = {"d_latent": 4, "d_rope": 2}


@pytest.mark.parametrize("layout", [{}, {"page_size": 4, "form": "full_mask"}], ids=["slots", "pages"])
def test_equals_the_dense_oracle(layout: dict[str, Any]) -> None:
    bundle = synthetic.synthetic(3, prefix_len=(0, 1, 21), num_nodes=(1, 5, 9), num_heads=2, num_layers=1)
    inputs: dict[str, Any] = {**bundle.dense(0), "sm_scale": bundle.sm_scale}
    results = behind_the_dense_interface(bundle, verify_attn_paged, **layout)(**inputs)
    for actual, right in zip(results, verify_attn(**inputs), strict=True):
        for b, n in enumerate(bundle.request.num_nodes):
            np.testing.assert_allclose(actual[b, :n], right[b, :n], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "changes",
    [
        {"form": "mask_bits"},
        {"form": "parents"},
        {"form": "full_mask", "strided": True},
        {"page_size": 16, "int64": ("page_table", "kv_lens")},
        {"page_size": 4, "pool_drafts": True},
        {"pool_drafts": True, "strided": True, "int64": ("kv_indices", "draft_slots")},
    ],
    ids=str,
)
def test_layouts_give_one_answer(changes: dict[str, Any]) -> None:
    case = Case((9, 0, 70), (21, 3, 0), 2, **SMALL)
    for actual, right in zip(dataclasses.replace(case, **changes).answer(), case.answer(), strict=True):
        np.testing.assert_array_equal(actual, right)


def one_node(scores: list[float], **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Out, lse and keys of one node whose prefix keys score as given: the rotary column carries the score."""
    keys = np.random.default_rng(1).standard_normal((len(scores), 5))
    keys[:, 4] = scores
    q = np.zeros((1, 1, 5))
    q[..., 4] = 1
    indices = {"kv_indptr": np.array([0, len(scores)]), "kv_indices": np.arange(len(scores))}
    arguments: dict[str, Any] = {
        "qo_indptr": np.array([0, 1]),
        **indices,
        "skip_draft": True,
        "sm_scale": 1.0,
        "d_latent": 4,
    }
    out, lse = verify_attn_paged(q, keys, **arguments | options)
    return out[0, 0], lse[0, 0], keys


@pytest.mark.parametrize("cap", [0.5, 3.0, 50.0])
def test_the_cap_is_a_tanh_of_the_scaled_score(cap: float) -> None:
    out, lse, keys = one_node([0.0, 4.0], sm_scale=0.5, logit_cap=cap)
    gap = cap * math.tanh(2.0 / cap)
    second = 1 / (1 + math.exp(-gap))
    np.testing.assert_allclose(out, (1 - second) * keys[0, :4] + second * keys[1, :4], rtol=1e-13)
    assert lse == pytest.approx(gap + math.log1p(math.exp(-gap)), rel=1e-13)


@pytest.mark.parametrize("slot", [-1, 2, 2**40])
def test_a_slot_outside_the_pool_is_a_row_of_zeros(slot: int) -> None:
    out, lse, keys = one_node([1.0, 1.0], kv_indices=np.array([0, slot]))
    first = math.e / (math.e + 1)
    np.testing.assert_allclose(out, first * keys[0, :4], rtol=1e-13)
    assert lse == pytest.approx(math.log(math.e + 1), rel=1e-13)


def test_a_lineage_is_the_node_and_its_ancestors() -> None:
    """Two roots, 0 and 2; a line 2, 1, 3 that is not in order; 4 below 0."""
    parents = np.array([-1, 2, -1, 1, 0], np.int32)
    seen = [{0}, {1, 2}, {2}, {1, 2, 3}, {0, 4}]
    mask = np.array([[j in row for j in range(5)] for row in seen])
    shared: dict[str, Any] = {
        "qo_indptr": np.array([0, 5]),
        "kv_indptr": np.array([0, 0]),
        "kv_indices": np.zeros(0, int),
    }
    shared |= {"draft_kv": np.random.default_rng(2).standard_normal((5, 6)), "sm_scale": 1.0, "d_latent": 4}
    q = np.random.default_rng(3).standard_normal((5, 2, 6))
    pool = np.zeros((1, 6))
    for actual, right in zip(
        verify_attn_paged(q, pool, parents=parents, **shared),
        verify_attn_paged(q, pool, mask=mask, **shared),
        strict=True,
    ):
        np.testing.assert_array_equal(actual, right)


def test_prefix_and_drafts_apart_make_the_whole() -> None:
    case = Case((5, 2), (9, 4), 3, form="full_mask", **SMALL)
    (prefix, prefix_lse), (drafts, drafts_lse) = (
        dataclasses.replace(case, skip=skip).answer() for skip in ("draft", "prefix")
    )
    out, lse = case.answer()
    np.testing.assert_allclose(np.logaddexp(prefix_lse, drafts_lse), lse, rtol=1e-13)
    weight = np.exp(prefix_lse - lse)[..., None]
    np.testing.assert_allclose(weight * prefix + (1 - weight) * drafts, out, rtol=1e-11, atol=1e-13)


def test_rows_without_an_answer() -> None:
    """A row that sees nothing is zero, one that belongs to no request is not a number."""
    case = Case((4,), (0,), 2, tree="any", **SMALL)
    out, lse = verify_attn_paged(**case.inputs())
    np.testing.assert_array_equal(out[2], 0)
    np.testing.assert_array_equal(lse[2], -np.inf)
    assert np.isfinite(lse[[0, 1, 3]]).all()
    assert np.isnan(out[case.live.stop :]).all()
    assert np.isnan(lse[case.live.stop :]).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_what_nobody_sees_has_no_influence(poison: float) -> None:
    for case in (Case((9, 0, 3), (21, 2, 0), 2, tree="any", **SMALL), Case((3,), (7,), 2, page_size=4, **SMALL)):
        poisoned = verify_attn_paged(**case.inputs(poison))
        for actual, right in zip(poisoned, verify_attn_paged(**case.inputs(0.0)), strict=True):
            np.testing.assert_array_equal(actual, right)
