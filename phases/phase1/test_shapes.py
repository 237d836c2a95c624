"""Phase 1: dense kernels against the float64 oracle over shapes that the captured bundles do not have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine.compare import compare
from kdtree_engine.ops.verify_attn import LSE_ABS, OUT_ROW_REL_L2
from oracle import verify_attn as oracle

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from phases.places import Place

    Array = npt.NDArray[Any]
    Evidence = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """A shape and how it is masked; its data are drawn from its own fields."""

    batch: int
    q_len: int
    num_heads: int
    kv_len: int
    d_latent: int = 512
    d_rope: int = 64
    split_tokens: int = 0
    mask: str = "random"  # none, random, tree, nothing (rows that see no key), last (only the last key)
    ragged: bool = True  # kv_len per request

    def __str__(self) -> str:
        split = f"-split{self.split_tokens}" if self.split_tokens else ""
        return (
            f"b{self.batch}_q{self.q_len}_h{self.num_heads}_kv{self.kv_len}"
            f"_{self.d_latent}_{self.d_rope}-{self.mask}{split}{'' if self.ragged else '-full'}"
        )

    def inputs(self) -> dict[str, Any]:
        rng = np.random.default_rng([ord(letter) for letter in str(self)])
        width = self.d_latent + self.d_rope
        used = rng.integers(0, self.kv_len, self.batch, endpoint=True).astype(np.int32)
        used[0] = self.kv_len
        return {
            "q": rng.standard_normal((self.batch, self.q_len, self.num_heads, width), np.float32),
            "kv": rng.standard_normal((self.batch, self.kv_len, width), np.float32),
            "mask": self._mask(rng),
            "kv_len": used if self.ragged else None,
            "sm_scale": width**-0.5 * 2.0,  # scores of standard deviation 2
            "d_latent": self.d_latent,
        }

    def _mask(self, rng: np.random.Generator) -> Array | None:
        shape = (self.batch, self.q_len, self.kv_len)
        if self.mask == "none":
            return None
        if self.mask == "random":
            return (rng.random(shape) < 0.7).astype(np.uint8)
        mask = np.zeros(shape, np.uint8)
        if self.mask == "last":
            mask[..., -1] = 255
        elif self.mask == "nothing":
            mask[:, self.q_len // 2] = rng.random((self.batch, self.kv_len)) < 0.5
        else:
            mask[..., : max(self.kv_len - self.q_len, 0)] = 1
            for node in range(min(self.q_len, self.kv_len)):
                seen = mask[:, node, -self.q_len :]
                if node:
                    seen |= mask[:, rng.integers(node), -self.q_len :]
                seen[:, node] = 1
        return mask


HEADS = [Case(2, 3, num_heads, 70) for num_heads in (1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 64, 128)]
NODES = [Case(1, q_len, 4, 130, mask="tree") for q_len in (1, 2, 3, 8, 16, 17, 33, 64, 65, 256)]
KEYS = [Case(2, 5, 3, kv_len) for kv_len in (1, 2, 8, 63, 64, 65, 127, 128, 129, 300)]
GEOMETRIES = [
    Case(2, q_len, 10, 150, *geometry) for geometry in ((512, 0), (256, 64), (256, 32)) for q_len in (1, 3, 9)
]
SPLITS = [
    Case(2, q_len, 8, 400, split_tokens=split, mask="tree") for q_len in (1, 4, 9) for split in (64, 128, 192, 448)
]
MASKS = [
    Case(2, q_len, 8, 200, mask=mask, ragged=ragged, split_tokens=split)
    for q_len in (2, 9)
    for mask, ragged, split in (
        ("none", True, 0),
        ("none", False, 0),
        ("nothing", True, 64),
        ("last", False, 64),
        ("random", False, 64),
    )
]
CASES = [*HEADS, *NODES, *KEYS, *GEOMETRIES, *SPLITS, *MASKS]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(place: Place, kernel_name: str, case: Case, evidence: Evidence) -> None:
    inputs = case.inputs()
    out, lse = place.verify_attn(kernel_name, **inputs, split_tokens=case.split_tokens)
    expected_out, expected_lse = oracle.verify_attn(**inputs)
    for comparison, bounds in (
        (compare(out, expected_out, name="out"), {"row_rel_l2": OUT_ROW_REL_L2}),
        (compare(lse, expected_lse, name="lse"), {"max_abs": LSE_ABS}),
    ):
        evidence(kernel=kernel_name, **{f"{comparison.name}_{name}": getattr(comparison, name) for name in bounds})
        assert comparison.within(**bounds), comparison.report()
    blind = np.isneginf(expected_lse)
    assert (out[blind] == 0.0).all()


def test_every_key_counts_once(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """Closed form at the longest context: with q = 0 every key weighs 1 / kv_len and lse = ln kv_len.

    Column c holds the keys' c-th binary digit, so a key that is dropped or counted twice anywhere shows.
    """
    kv_len = 262_144
    kv = np.zeros((1, kv_len, 576), np.float32)
    kv[0, :, :18] = np.arange(kv_len)[:, None] >> np.arange(18) & 1
    kv[0, :, 18] = 1.0
    out, lse = place.verify_attn(kernel_name, np.zeros((1, 1, 2, 576), np.float32), kv, sm_scale=1.0)
    np.testing.assert_allclose(out[0, 0, :, :18], 0.5, rtol=1e-6)
    np.testing.assert_allclose(out[0, 0, :, 18], 1.0, rtol=1e-6)
    assert (out[0, 0, :, 19:] == 0.0).all()
    np.testing.assert_allclose(lse, math.log(kv_len), rtol=1e-6)
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("gap", [0.0, 1.0, -3.0, 40.0])
def test_two_keys(place: Place, kernel_name: str, gap: float, evidence: Evidence) -> None:
    """Closed form: the weight of the first of two keys is the logistic function of their score gap."""
    q = np.zeros((1, 1, 1, 576), np.float32)
    kv = np.zeros((1, 2, 576), np.float32)
    q[..., 575] = 1.0  # the last rotary element makes the scores, the first latent elements tell the keys apart
    kv[0, 0, 575], kv[0, 0, 0], kv[0, 1, 1] = gap * 4.0, 1.0, 1.0
    out, lse = place.verify_attn(kernel_name, q, kv, sm_scale=0.25)
    weight = 1.0 / (1.0 + math.exp(-gap))
    np.testing.assert_allclose(out[0, 0, 0, :2], [weight, 1.0 - weight], rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(lse[0, 0, 0], math.log1p(math.exp(-gap)) + gap, rtol=1e-6, atol=1e-7)
    evidence(kernel=kernel_name)


def test_huge_scores_pick_one_key(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """Scores far beyond exp's range, of either sign, still give the best key's own value, exactly."""
    for sign in (1.0, -1.0):
        q = np.full((1, 2, 3, 576), sign, np.float32)
        kv = np.zeros((1, 100, 576), np.float32)
        kv[0, :, 512:] = np.arange(100.0)[:, None] * 10.0
        kv[0, :, :512] = 0.0
        kv[0, :, 7] = np.arange(100.0)
        out, lse = place.verify_attn(kernel_name, q, kv, sm_scale=1.0)
        best = 99 if sign > 0 else 0
        assert (out[..., 7] == np.float32(best)).all()
        np.testing.assert_allclose(lse, sign * best * 641.0, rtol=1e-6)
        evidence(kernel=kernel_name)
