"""Phase 2 on a GPU only: streams, graphs, 64-bit addresses, other tensors than a GPU's, and agreement with the host.

Collected with `--place cuda`; on the host there is nothing here to run.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kdtree_engine import KernelError, verify_attn_paged
from kdtree_engine.compare import compare
from kdtree_engine.ops.verify_attn_paged import LSE_ABS, OUT_ROW_REL_L2
from phases import sanitizer
from phases.paged import Case, as_floats, behind_the_dense_interface, problems
from phases.phase2.test_host_variants import CASES
from phases.places import Place

if TYPE_CHECKING:
    from collections.abc import Callable

    from kdtree_engine.bundle import Bundle

    Evidence = Callable[..., None]

OPS = ("verify_attn_paged",)


def random(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def indices(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def on_gpu(place: Place, inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: place.strided(value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()}


def test_agrees_with_the_host(place: Place, kernel_name: str, bundle: Bundle, evidence: Evidence) -> None:
    """Both are within the tolerance of the oracle, so within twice of it of each other; the difference is recorded."""
    results = []
    for where in (place, Place("host")):

        def call(*tensors: Any, **arguments: Any) -> Any:
            return where.verify_attn_paged(kernel_name, *tensors, **arguments)  # noqa: B023 - within this iteration

        results.append(behind_the_dense_interface(bundle, call)(**bundle.dense(0), sm_scale=bundle.sm_scale))
    out, lse = (compare(*pair, name=name) for name, *pair in zip(("out", "lse"), *results, strict=True))
    evidence(
        kernel=kernel_name,
        bundle=bundle.name,
        host_row_rel_l2=out.row_rel_l2,
        host_max_abs=out.max_abs,
        host_lse_abs=lse.max_abs,
        same_bits=float(np.mean(results[0][0] == results[1][0])),
    )
    assert out.within(row_rel_l2=2 * OUT_ROW_REL_L2), out.report()
    assert lse.within(max_abs=2 * LSE_ABS), lse.report()


# Batches of one capacity and different contents, in the layouts of a graph's buffers.
GRAPHS = [
    (
        Case((9, 3, 7), (200, 70, 40), 8, form="full_mask", int64=("qo_indptr", "kv_indices")),
        [
            Case((1, 9, 9), (0, 300, 10), 8, form="full_mask"),
            Case((9, 9, 0), (310, 0, 0), 8, tree="any", form="full_mask"),
        ],
    ),
    (
        Case((4, 4, 4), (33, 100, 64), 5, page_size=16, pool_drafts=True, form="mask_bits"),
        [
            Case((8, 0, 4), (1, 50, 120), 5, tree="any", form="mask_bits"),
            Case((1, 1, 1), (190, 2, 2), 5, form="mask_bits"),
        ],
    ),
    (
        Case((20, 20), (100, 100), 4, form="parents", split_tokens=64),
        [Case((33, 2), (1, 190), 4, form="parents"), Case((0, 40), (0, 200), 4, form="parents")],
    ),
]


@pytest.mark.parametrize(("case", "others"), GRAPHS, ids=["slots", "pages", "split"])
def test_graph_follows_the_device(
    place: Place, kernel_name: str, case: Case, others: list[Case], evidence: Evidence
) -> None:
    """A captured call reads every array anew at every replay, lengths included, without a host in between.

    The arrays are as large as the largest of the batches needs.
    """
    layout = {name: getattr(case, name) for name in ("page_size", "pool_drafts", "int64", "split_tokens")}
    batches = [dataclasses.replace(other, **layout) for other in others]
    contents = [batch.inputs() for batch in (*batches, case)]
    largest = {
        name: np.max([content[name].shape for content in contents], axis=0)
        for name, value in contents[0].items()
        if isinstance(value, np.ndarray)
    }
    buffers = on_gpu(place, {name: np.zeros(shape, contents[0][name].dtype) for name, shape in largest.items()})
    options = case.options() | {name: value for name, value in contents[0].items() if name not in buffers}
    options["max_q_len"] = max(1, *(nodes for batch in (*batches, case) for nodes in batch.nodes))
    if case.split_tokens:
        options["max_kv_len"] = max(max(batch.prefix) for batch in (*batches, case))

    def fill(content: dict[str, Any]) -> None:
        for name, buffer in buffers.items():
            buffer.zero_()
            buffer[tuple(slice(0, size) for size in content[name].shape)] = place.strided(content[name])

    fill(contents[-1])
    call = {**buffers, **options, "kernel": kernel_name, "library": place.library}
    verify_attn_paged(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = verify_attn_paged(**call)
    for batch, content in zip((*batches, case), contents, strict=True):
        fill(content)
        graph.replay()
        live = batch.live
        found, figures = problems((place.array(out)[live], place.array(lse)[live]), batch.answer())
        evidence(kernel=kernel_name, **figures)
        assert not found, found
        eager_out, eager_lse = verify_attn_paged(**call)
        assert torch.equal(out[live], eager_out[live])
        assert torch.equal(lse[live], eager_lse[live])


def test_runs_on_the_current_stream(kernel_name: str, place: Place, evidence: Evidence) -> None:
    """Work queued before the call on its stream is done before it, work queued after waits for it."""
    case = Case((9, 9), (3000, 2000), 8)
    tensors = on_gpu(place, case.inputs(0.0)) | {"kernel": kernel_name, "library": place.library}
    q, pool = tensors.pop("q"), tensors.pop("kv_pool")
    expected, _ = verify_attn_paged(q, pool * 2, **tensors)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        slow = random(6000, 6000).float()
        for _ in range(5):
            slow = slow @ slow
        late = pool * 2 + 0 * slow[0, 0].nan_to_num(0, 0, 0).bfloat16()
        out, _ = verify_attn_paged(q, late, **tensors)
        result = out.clone()
        late.zero_()
    side.synchronize()
    assert torch.equal(result[case.live], expected[case.live])
    evidence(kernel=kernel_name)


def test_slots_beyond_32_bits(kernel_name: str, place: Place, evidence: Evidence) -> None:
    """Slot ids whose offset of elements passes 2^31, and 2^32: prefix and drafts are found there."""
    num_slots, prefix, n = 2**32 // 576 + 1000, 500, 5
    assert num_slots - 1 > 3_728_270
    far = torch.empty(num_slots, 576, dtype=torch.bfloat16, device="cuda")
    far[:1000] = torch.nan
    far[-1000:] = random(1000, 576)
    middle = 2**31 // 576 - 250
    far[middle : middle + 500] = random(500, 576, seed=1)
    q = random(n, 16, 576, seed=2)
    shared: dict[str, Any] = {"sm_scale": 0.1, "kernel": kernel_name, "library": place.library, "split_tokens": 64}
    shared |= {"max_kv_len": prefix, "qo_indptr": indices(0, n), "kv_indptr": indices(0, prefix)}
    for first in (middle, num_slots - 900):
        slots = torch.arange(first, first + prefix, device="cuda").flip(0)
        drafts = torch.arange(num_slots - n, num_slots, device="cuda")
        out, lse = verify_attn_paged(q, far, kv_indices=slots, draft_slots=drafts, **shared)
        near = torch.cat([far[slots], far[drafts]])
        order = torch.arange(prefix + n, device="cuda")
        near_out, near_lse = verify_attn_paged(q, near, kv_indices=order[:prefix], draft_slots=order[prefix:], **shared)
        assert torch.isfinite(lse).all()
        assert torch.equal(out, near_out)
        assert torch.equal(lse, near_lse)
    pages = torch.tensor([[num_slots // 64 - 1, 7_000_000 // 64]], device="cuda")
    whole = far[: num_slots // 64 * 64]
    drafts = torch.arange(len(whole) - n, len(whole), device="cuda")
    out, lse = verify_attn_paged(
        q,
        whole.view(-1, 64, 576),
        page_table=pages,
        kv_lens=indices(64),
        page_size=64,
        draft_slots=drafts,
        **{name: value for name, value in shared.items() if name != "kv_indptr"},
    )
    last = torch.arange(len(whole) - 64, len(whole), device="cuda")
    shared["kv_indptr"] = indices(0, 64)
    slots_out, slots_lse = verify_attn_paged(q, far, kv_indices=last, draft_slots=drafts, **shared)
    assert torch.equal(out, slots_out)
    assert torch.equal(lse, slots_lse)
    evidence(kernel=kernel_name)


def test_queries_beyond_32_bits(kernel_name: str, place: Place, evidence: Evidence) -> None:
    """T * H * 576 > 2^31, and T * H * 512 too: the last request's rows are as if it were alone."""
    batch, n, num_heads = 134, 256, 128
    q = torch.zeros(batch * n, num_heads, 576, dtype=torch.bfloat16, device="cuda")
    assert q.shape[0] * num_heads * 512 > 2**31
    q[-n:] = random(n, num_heads, 576)
    draft_kv = random(batch * n, 576)
    options: dict[str, Any] = {"sm_scale": 0.1, "kernel": kernel_name, "library": place.library}
    options |= {"split_tokens": 1024, "max_kv_len": 0, "kv_pool": random(1, 576)}
    empty = torch.zeros(0, dtype=torch.int32, device="cuda")

    def call(count: int) -> tuple[Any, Any]:
        qo_indptr = torch.arange(count + 1, dtype=torch.int64, device="cuda") * n
        kv_indptr = torch.zeros(count + 1, dtype=torch.int32, device="cuda")
        rows = slice(-count * n, None)
        tensors = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": empty, "draft_kv": draft_kv[rows]}
        out, lse = verify_attn_paged(q[rows], **tensors, **options)
        return out[-n:], lse[-n:]

    out, lse = call(batch)
    alone_out, alone_lse = call(1)
    assert torch.equal(out, alone_out)
    assert torch.equal(lse, alone_lse)
    evidence(kernel=kernel_name)


@pytest.mark.parametrize(
    ("argument", "change", "words"),
    [
        ("kv_pool", lambda t: t.cpu(), "cpu"),
        ("kv_indices", lambda t: t.cpu(), "cpu"),
        ("mask", lambda t: t.cpu(), "cpu"),
        ("q", lambda t: t.half(), "float16"),
        ("draft_kv", lambda t: t.float(), "float32"),
        ("qo_indptr", lambda t: t.short(), "int16"),
        ("kv_pool", lambda t: t.float().cpu().numpy(), "numpy"),
    ],
)
def test_wrong_tensor(
    place: Place, argument: str, change: Callable[[Any], Any], words: str, evidence: Evidence
) -> None:
    tensors = on_gpu(place, Case().inputs())
    tensors[argument] = change(tensors[argument])
    with pytest.raises(KernelError) as raised:
        verify_attn_paged(**tensors, library=place.library)
    assert raised.value.argument == argument
    assert words in str(raised.value)
    evidence(kernel="verify_attn_flash_paged")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_hosts_cases(place: Place, kernel_name: str, case: Case, evidence: Evidence) -> None:
    """What the sanitizers see is also right."""
    out, lse = place.verify_attn_paged(kernel_name, **case.inputs(), **case.options())
    host_out, _ = Place("host").verify_attn_paged(kernel_name, **case.inputs(), **case.options())
    found, figures = problems((out[case.live], lse[case.live]), case.answer())
    same = np.mean(as_floats(out[case.live]) == as_floats(host_out[case.live]))
    evidence(kernel=kernel_name, **figures, same_bits=float(same))
    assert not found, found


# Not racecheck: it loses the barriers of a whole block once groups of its warps have met apart, and reports accesses
# that such a barrier separates (plan 0002). The host's race checker, which knows them, answers for this kernel.
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_sanitizer_is_silent(tool: str, evidence: Evidence) -> None:
    evidence(tool=tool, summary=sanitizer.summary(tool, "phases.phase2.sanitized", "attention"))
