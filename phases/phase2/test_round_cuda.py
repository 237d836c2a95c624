"""The ops of a round on a GPU only: graphs, streams, 64-bit addresses, other tensors than a GPU's, the sanitizers.

That they agree with the host follows from the oracle's cases, which have no tolerance.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kdtree_engine import KernelError, kv_compact, tree_accept, tree_build
from kdtree_engine.ops.tree_accept import tree_accept_workspace_size
from phases import sanitizer
from phases.rounds import ACCEPT_CASES, BUILD_CASES, COMPACT_CASES, BuildCase, arrays, differences

if TYPE_CHECKING:
    from collections.abc import Callable

    from phases.places import Place

    Evidence = Callable[..., None]

OPS: dict[str, Callable[..., Any]] = {"tree_build": tree_build, "tree_accept": tree_accept, "kv_compact": kv_compact}
# Contents of one shape, to be put into a captured graph's buffers.
GRAPHS: dict[str, list[Any]] = {
    "tree_build": [BuildCase(9, 6, 9, 40, ragged=True, seed=seed) for seed in range(4)],
    "tree_accept": [dataclasses.replace(ACCEPT_CASES[0], num_nodes=nodes) for nodes in ((17, 1, 9), (3, 17, 17))]
    + [dataclasses.replace(ACCEPT_CASES[0], num_nodes=(17, 4, 4), target="argmax-bfloat16", vocab_size=5000)],
    "kv_compact": [dataclasses.replace(COMPACT_CASES[0], kind=kind) for kind in ("paths", "all", "roots", "swaps")],
}


def tensors(place: Place, inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: place.given(value) for name, value in inputs.items()}


def assert_right(place: Place, op: str, case: Any, inputs: dict[str, Any], out: Any) -> None:
    """The outputs, and the pools that were written in place, are the oracle's."""
    found = arrays(place, out)
    if op == "kv_compact":
        found["pools"] = place.array(inputs["pools"])
    assert not differences(found, case.answer())


@pytest.mark.parametrize("op", OPS)
def test_graph_follows_the_device(op: str, place: Place, evidence: Evidence) -> None:
    """A captured call reads every array anew at every replay, without a host in between; outputs are reused."""
    graphs: dict[tuple[Any, ...], Any] = {}
    for case in (*GRAPHS[op], *GRAPHS[op]):
        inputs = tensors(place, case.inputs())
        key = tuple(sorted((name, tuple(value.shape)) for name, value in inputs.items() if hasattr(value, "shape")))
        if key not in graphs:
            buffers = {name: value.clone() if hasattr(value, "shape") else value for name, value in inputs.items()}
            out = OPS[op](**buffers, library=place.library)
            workspace = {}
            if "logits" in buffers:
                rows, vocab_size = buffers["logits"].shape
                size = tree_accept_workspace_size(total_q=rows, vocab_size=vocab_size, library=place.library)
                workspace["workspace"] = torch.empty(size, dtype=torch.uint8, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                OPS[op](**buffers, **workspace, out=out, library=place.library)
            graphs[key] = graph, buffers, out, workspace
        graph, buffers, out, _ = graphs[key]
        for name, value in inputs.items():
            if hasattr(value, "shape"):
                buffers[name].copy_(value)
        for tensor in out:
            tensor.fill_(77)
        graph.replay()
        assert_right(place, op, case, buffers, out)
    evidence(kernel=op, graphs=len(graphs))


@pytest.mark.parametrize("op", OPS)
def test_runs_on_the_current_stream(op: str, place: Place, evidence: Evidence) -> None:
    """Work queued before the call on its stream is done before it, work queued after waits for it."""
    case = GRAPHS[op][0]
    inputs = tensors(place, case.inputs())
    first = next(name for name in inputs if name in ("log_probs", "target_tokens", "path"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        right = inputs[first].clone()
        inputs[first].zero_()
        slow = torch.randn(6000, 6000, device="cuda")
        for _ in range(5):
            slow = slow @ slow
        inputs[first].copy_(right + (0 * slow[0, 0].nan_to_num(0, 0, 0)).to(right.dtype))
        out = OPS[op](**inputs, library=place.library)
        result = type(out)(*(tensor.clone() for tensor in out))
        for tensor in out:
            tensor.fill_(77)
    side.synchronize()
    assert_right(place, op, case, inputs, result)
    evidence(kernel=op)


def test_logits_beyond_32_bits(place: Place, evidence: Evidence) -> None:
    """The last rows of logits of more than 2^32 elements."""
    vocab_size, rows = 163_840, 2**32 // 163_840 + 60
    logits = torch.zeros(rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    wanted = torch.randint(vocab_size, (rows,), device="cuda", dtype=torch.int32)
    logits.scatter_(1, wanted[:, None].long(), 1.0)
    batch = rows // 30
    tokens = torch.zeros(batch, 30, dtype=torch.int32, device="cuda")
    parents = torch.zeros_like(tokens) - (torch.arange(30, device="cuda") == 0).int()
    out = tree_accept(tokens, parents=parents, logits=logits[: batch * 30], library=place.library)
    assert torch.equal(out.node_targets.reshape(-1), wanted[: batch * 30])
    drawn = tree_accept(
        tokens,
        parents=parents,
        logits=logits[: batch * 30],
        uniforms=torch.zeros(batch, 30, device="cuda") + 1 - 2**-24,
        temperature=1e-3,
        library=place.library,
    )
    assert torch.equal(drawn.node_targets.reshape(-1), wanted[: batch * 30])
    evidence(kernel="tree_accept")


def test_pools_beyond_32_bits(place: Place, evidence: Evidence) -> None:
    """Rows whose offset in a layer, and layers whose offset, pass 2^32 bytes."""
    num_slots = 2**32 // 1152 + 5000
    pools = torch.empty(2, num_slots, 576, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([[num_slots - 1, 7, num_slots - 900, 2**31 // 1152, 2**32 // 1152 + 1]], device="cuda")
    pools[:, slots[0]] = torch.randn(2, 5, 576, device="cuda").bfloat16()
    before = pools[:, slots[0]].clone()
    path = torch.tensor([[0, 2, 4]], dtype=torch.int32, device="cuda")
    length = torch.tensor([3], dtype=torch.int32, device="cuda")
    out = kv_compact(pools, path, length, node_slots=slots, library=place.library)
    assert torch.equal(pools[:, slots[0]], before[:, [0, 2, 4, 3, 4]])
    assert out.committed_slots.tolist() == [slots[0, :3].tolist()]
    evidence(kernel="kv_compact")


def test_large_trees(place: Place, evidence: Evidence) -> None:
    """Outputs of more than 2^31 elements: the last request's is as if it were alone."""
    batch = 2**31 // 1025**2 + 3
    case = dataclasses.replace(BUILD_CASES[2], batch=1)
    inputs = tensors(place, case.inputs())
    alone = tree_build(**inputs, library=place.library)
    many = {
        name: value.expand(batch, *value.shape[1:]).contiguous() if hasattr(value, "shape") else value
        for name, value in inputs.items()
    }
    out = tree_build(**many, library=place.library)
    for name, tensor, right in zip(out._fields, out, alone, strict=True):
        offset = (batch - 1) * 1025 if name == "retrive_index" else 0
        assert torch.equal(tensor[-1] - offset, right[0]), name
    evidence(kernel="tree_build")


@pytest.mark.parametrize("op", OPS)
def test_tensors_of_other_kinds(op: str, place: Place, evidence: Evidence) -> None:
    """Each tensor on the host, or of NumPy, beside the others on the GPU."""
    inputs = tensors(place, GRAPHS[op][0].inputs())
    for name, value in inputs.items():
        for other in (value.cpu(), place.array(value)) if hasattr(value, "shape") else ():
            with pytest.raises(KernelError) as raised:
                OPS[op](**(inputs | {name: other}), library=place.library)
            assert raised.value.argument in (name, "library")
    evidence(kernel=op)


@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_sanitizer_is_silent(tool: str, evidence: Evidence) -> None:
    evidence(tool=tool, summary=sanitizer.summary(tool, "phases.phase2.sanitized", "rounds"))
