"""Phase 1 on a GPU only: streams, graphs, 64-bit addresses, torch's ways of being wrong, and agreement with the host.

Collected with `--place cuda`; on the host there is nothing here to run.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kdtree_engine import KernelError, verify_attn
from kdtree_engine.compare import compare
from kdtree_engine.ops.verify_attn import LSE_ABS, OUT_ROW_REL_L2, _Args
from phases import sanitizer
from phases.places import Place

if TYPE_CHECKING:
    from collections.abc import Callable

    from kdtree_engine.bundle import Bundle

    Evidence = Callable[..., None]


def random(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def test_agrees_with_the_host(place: Place, kernel_name: str, bundle: Bundle, evidence: Evidence) -> None:
    """Both are within the tolerance of the oracle, so within twice of it of each other; the difference is recorded."""
    inputs: dict[str, Any] = {**bundle.dense(0, math.nan), "sm_scale": bundle.sm_scale, "d_latent": bundle.d_latent}
    out, lse = place.verify_attn(kernel_name, **inputs)
    host_out, host_lse = Place("host").verify_attn(kernel_name, **inputs)
    outs, lses = compare(out, host_out, name="out"), compare(lse, host_lse, name="lse")
    evidence(
        kernel=kernel_name,
        bundle=bundle.name,
        host_row_rel_l2=outs.row_rel_l2,
        host_max_abs=outs.max_abs,
        host_lse_abs=lses.max_abs,
        same_bits=float(np.mean(out == host_out)),
    )
    assert outs.within(row_rel_l2=2 * OUT_ROW_REL_L2), outs.report()
    assert lses.within(max_abs=2 * LSE_ABS), lses.report()


def test_graph_follows_the_device(kernel_name: str, place: Place, evidence: Evidence) -> None:
    """A captured call reads q, kv, mask and kv_len anew at every replay, and runs without a host in between."""
    tensors: dict[str, Any] = {
        "q": random(3, 9, 8, 576),
        "kv": random(3, 700, 576),
        "mask": torch.ones(3, 9, 700, dtype=torch.uint8, device="cuda"),
        "kv_len": torch.full((3,), 700, dtype=torch.int32, device="cuda"),
    }
    options: dict[str, Any] = {"sm_scale": 0.1, "kernel": kernel_name, "library": place.library}
    verify_attn(**tensors, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = verify_attn(**tensors, **options)
    for seed in (1, 2):
        tensors["q"].copy_(random(3, 9, 8, 576, seed=seed))
        tensors["kv"].copy_(random(3, 700, 576, seed=seed + 10))
        tensors["mask"].copy_((random(3, 9, 700, seed=seed + 20) > 0).to(torch.uint8))
        tensors["kv_len"].copy_(torch.tensor([0, 65, 700 - seed], dtype=torch.int32))
        graph.replay()
        expected_out, expected_lse = verify_attn(**tensors, **options)
        assert torch.equal(out, expected_out)
        assert torch.equal(lse, expected_lse)
    evidence(kernel=kernel_name)


def test_runs_on_the_current_stream(kernel_name: str, place: Place, evidence: Evidence) -> None:
    """Work queued before the call on its stream is done before it, work queued after waits for it."""
    q, kv = random(2, 9, 8, 576), random(2, 3000, 576)
    options: dict[str, Any] = {"sm_scale": 0.1, "kernel": kernel_name, "library": place.library}
    expected, _ = verify_attn(q, kv * 2, **options)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        slow = random(6000, 6000)
        for _ in range(5):
            slow = slow @ slow
        late = kv * 2 + 0 * slow[0, 0].nan_to_num(0, 0, 0)
        out, _ = verify_attn(q, late, **options)
        result = out.clone()
        late.zero_()
    side.synchronize()
    assert torch.equal(result, expected)
    evidence(kernel=kernel_name)


def test_query_side_beyond_32_bits(kernel_name: str, place: Place, evidence: Evidence) -> None:
    """batch * q_len * num_heads * 576 > 2^31: the last request's rows are as if it were alone."""
    batch, q_len, num_heads = 118, 256, 128
    q = torch.zeros(batch, q_len, num_heads, 576, device="cuda")
    assert q.numel() > 2**31
    q[-1] = random(q_len, num_heads, 576)
    kv = random(batch, 5, 576)
    options: dict[str, Any] = {"sm_scale": 0.1, "kernel": kernel_name, "library": place.library}
    out, lse = verify_attn(q, kv, **options)
    alone_out, alone_lse = verify_attn(q[-1:].clone(), kv[-1:].clone(), **options)
    assert torch.equal(out[-1:], alone_out)
    assert torch.equal(lse[-1:], alone_lse)
    torch.testing.assert_close(out[0, 0, 0], kv[0, :, :512].mean(0), rtol=1e-5, atol=1e-6)
    evidence(kernel=kernel_name)


def test_cache_side_beyond_32_bits(kernel_name: str, place: Place, evidence: Evidence) -> None:
    """batch * kv_len * 576 > 2^31: the last request's keys are found."""
    batch, kv_len = 15, 262_144
    kv = torch.zeros(batch, kv_len, 576, device="cuda")
    assert kv.numel() > 2**31
    kv[-1] = random(kv_len, 576)
    q = random(batch, 2, 4, 576)
    options: dict[str, Any] = {"sm_scale": 0.05, "kernel": kernel_name, "library": place.library}
    out, lse = verify_attn(q, kv, **options)
    alone_out, alone_lse = verify_attn(q[-1:].clone(), kv[-1:].clone(), **options)
    assert torch.equal(out[-1:], alone_out)
    assert torch.equal(lse[-1:], alone_lse)
    scores = torch.einsum("qhd,kd->qhk", q[-1].double(), kv[-1].double()) * 0.05
    expected = torch.softmax(scores, -1) @ kv[-1, :, :512].double()
    comparison = compare(place.array(out[-1]), place.array(expected), name="out")
    assert comparison.within(row_rel_l2=OUT_ROW_REL_L2), comparison.report()
    evidence(kernel=kernel_name)


def test_split_workspace_beyond_32_bits(place: Place, evidence: Evidence) -> None:
    """Partial results of more than 2^31 bytes are addressed rightly."""
    batch, q_len, num_heads, kv_len = 4, 64, 64, 8192
    q, kv = random(batch, q_len, num_heads, 576), random(batch, kv_len, 576)
    options: dict[str, Any] = {"sm_scale": 0.1, "library": place.library, "split_tokens": 64}
    out, lse = verify_attn(q, kv, **options)
    alone_out, alone_lse = verify_attn(q[-1:].clone(), kv[-1:].clone(), **options)
    assert torch.equal(out[-1:], alone_out)
    assert torch.equal(lse[-1:], alone_lse)
    evidence(kernel="verify_attn_flash")


@pytest.mark.parametrize(
    ("argument", "change", "words"),
    [
        ("q", lambda t: t.cpu(), "cpu"),
        ("kv", lambda t: t.cpu(), "cpu"),
        ("mask", lambda t: t.cpu(), "cpu"),
        ("q", lambda t: t.half(), "float16"),
        ("kv", lambda t: t.bfloat16(), "bfloat16"),
        ("mask", lambda t: t.float(), "float32"),
        ("kv", lambda t: t[:, ::2], "strides"),
        ("q", lambda t: t[:, :, :3], "strides"),
        ("kv", lambda t: t.cpu().numpy(), "numpy"),
    ],
)
def test_wrong_tensor(
    place: Place, argument: str, change: Callable[[Any], Any], words: str, evidence: Evidence
) -> None:
    tensors: dict[str, Any] = {
        "q": random(2, 3, 4, 576),
        "kv": random(2, 70, 576),
        "mask": torch.ones(2, 3, 70, dtype=torch.uint8, device="cuda"),
    }
    tensors[argument] = change(tensors[argument])
    with pytest.raises(KernelError) as raised:
        verify_attn(**tensors, sm_scale=0.1, library=None if argument == "q" else place.library)
    assert raised.value.argument == argument
    assert words in str(raised.value)
    evidence(kernel="verify_attn_flash")


@pytest.mark.parametrize("name", ["q", "kv", "out", "lse", "mask"])
def test_host_memory_is_refused(place: Place, kernel_name: str, name: str, evidence: Evidence) -> None:
    """A host pointer at the C interface is one error line, not an illegal access that ends the context."""
    q, kv = random(1, 2, 4, 576), random(1, 64, 576)
    mask = torch.ones(1, 2, 64, dtype=torch.uint8, device="cuda")
    out, lse = torch.zeros(1, 2, 4, 512, device="cuda"), torch.zeros(1, 2, 4, device="cuda")
    args = _Args(
        struct_size=ctypes.sizeof(_Args),
        q=q.data_ptr(),
        kv=kv.data_ptr(),
        mask=mask.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        batch=1,
        q_len=2,
        num_heads=4,
        kv_len=64,
        d_latent=512,
        d_rope=64,
        sm_scale=0.1,
    )
    host = np.zeros(2 * 4 * 576 + 64 * 576, np.float32)
    setattr(args, name, (host.ctypes.data + 15) // 16 * 16)
    with pytest.raises(KernelError, match="host memory") as raised:
        place.library.call(kernel_name, ctypes.byref(args), None)
    assert raised.value.argument == name
    torch.cuda.synchronize()
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_sanitizer_is_silent(tool: str, evidence: Evidence) -> None:
    evidence(tool=tool, summary=sanitizer.summary(tool, "phases.phase1.sanitized"))
