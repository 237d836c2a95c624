"""Phase 0 on a GPU: the probe runs, and every intrinsic does what its emulation on the host was checked against."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from phases.phase0.conformance import CHECKS, CudaMemory, Runner

if TYPE_CHECKING:
    from collections.abc import Callable

    from phases.places import Place

    Evidence = Callable[..., None]


def test_probe(place: Place, evidence: Evidence) -> None:
    """cp.async, ldmatrix and mma.sync together, with small integers that bf16 and float32 hold exactly."""
    probe = ctypes.CDLL(str(place.library.path.with_name("libkdtree_probe.so")))
    probe.kdtree_probe_error.restype = ctypes.c_char_p
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (16, 16)), rng.integers(-8, 9, (8, 16))
    tensors = [torch.from_numpy(x.astype(np.float32)).bfloat16().cuda() for x in (a, b)]
    d = torch.full((16, 8), torch.nan, device="cuda")
    failed = probe.kdtree_probe(*(ctypes.c_void_p(t.data_ptr()) for t in (*tensors, d)), None)
    assert failed == 0, probe.kdtree_probe_error().decode()
    np.testing.assert_array_equal(d.cpu().numpy(), a @ b.T)
    evidence()


@pytest.mark.parametrize("name", CHECKS)
def test_intrinsic(name: str, place: Place, evidence: Evidence) -> None:
    CHECKS[name](Runner(place.library.path.with_name("libkdtree_conformance.so"), CudaMemory()))
    evidence()


def test_library_has_code_for_this_gpu(place: Place, evidence: Evidence) -> None:
    assert place.name in place.library.archs
    evidence()
