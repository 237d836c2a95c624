"""torch.ops.kdtree_engine.verify_attn_paged on CPU tensors, where torch is installed but no GPU need be."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import kdtree_engine.torch_ops  # noqa: F401 - registers the operator
from kdtree_engine import KernelError, merge_partials, verify_attn_paged
from kdtree_engine.bundle import to_bfloat16
from phases.discipline import assert_same_bits
from phases.paged import Case, problems

OPERATOR = torch.ops.kdtree_engine.verify_attn_paged

# Every argument of the operator, in one case or another.
CASES = [
    Case((2, 0, 3), (40, 7, 0), 2),
    Case((9, 1), (20, 33), 4, form="causal", tree="chain", hints=False, out_dtype="float32"),
    Case((5, 3), (33, 5), 4, form="full_mask", page_size=16, pool_drafts=True, strided=True, logit_cap=3.0),
    Case((7,), (70,), 4, 256, 32, form="mask_bits", split_tokens=32, int64=("qo_indptr", "kv_indices")),
    Case((4, 4), (20, 1), 2, form="parents", skip="prefix"),
    Case((4, 4), (20, 1), 2, skip="draft"),
]


def tensor(array: np.ndarray) -> torch.Tensor:
    """The array as a CPU tensor with the same strides; uint16 is taken for bfloat16 bits."""
    strides = [stride // array.itemsize for stride in array.strides]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(array.shape, strides, strict=True))
    flat = np.lib.stride_tricks.as_strided(array, (reach,), (array.itemsize,))
    signed = flat.view({"uint16": np.int16, "uint64": np.int64}.get(array.dtype.name, array.dtype))
    whole = torch.from_numpy(signed.copy())
    whole = whole.view(torch.bfloat16) if array.dtype == np.uint16 else whole
    return torch.as_strided(whole, array.shape, strides)


def array(result: torch.Tensor) -> np.ndarray:
    if result.dtype == torch.bfloat16:
        return np.asarray(result.view(torch.int16).numpy().view(np.uint16))
    return np.asarray(result.numpy())


def arguments(case: Case) -> dict[str, Any]:
    given = case.inputs() | case.options()
    return {name: tensor(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_the_numpy_call(case: Case) -> None:
    """To the bit; and that is right."""
    out, lse = map(array, OPERATOR(**arguments(case)))
    expected = verify_attn_paged(**case.inputs(), **case.options())
    live = case.live
    assert_same_bits((out[live], lse[live]), (expected[0][live], expected[1][live]))
    found, _ = problems((out[live], lse[live]), case.answer())
    assert not found, found


# torch compares whole results, so every row must be a request's.
@pytest.mark.parametrize("case", [dataclasses.replace(case, spare=0) for case in CASES], ids=str)
def test_torch_accepts_it(case: Case) -> None:
    """Schema, tracing with fake tensors, and what torch.compile makes of it."""
    torch.library.opcheck(OPERATOR, (), arguments(case))


def test_compiles_without_a_graph_break() -> None:
    case = CASES[0]
    given = arguments(case)

    def double(q: torch.Tensor) -> torch.Tensor:
        out, _ = OPERATOR(**given | {"q": q})
        return out * 2

    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(given["q"])[case.live], double(given["q"])[case.live])


def test_results_have_no_gradient() -> None:
    given = arguments(CASES[0])
    out, _ = OPERATOR(**given | {"q": given["q"].requires_grad_()})
    with pytest.raises(RuntimeError, match="autograd"):
        out.sum().backward()


def test_bad_argument_is_named() -> None:
    given = arguments(CASES[0])
    with pytest.raises(KernelError) as raised:
        OPERATOR(**given | {"draft_kv": given["draft_kv"].float()})
    assert raised.value.argument == "draft_kv"
    assert "float32" in str(raised.value)


@pytest.mark.parametrize("type_", ["bfloat16", "float32"])
def test_merge_partials_of_cpu_tensors(type_: str) -> None:
    rng = np.random.default_rng(20260720)
    outs, lses = rng.standard_normal((3, 5, 512), np.float32), rng.standard_normal((3, 5), np.float32)
    outs = to_bfloat16(outs) if type_ == "bfloat16" else outs
    out, lse = merge_partials(tensor(outs), tensor(lses))
    assert str(out.dtype) == f"torch.{type_}"
    assert_same_bits((array(out), array(lse)), merge_partials(outs, lses))


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import sys, kdtree_engine; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
