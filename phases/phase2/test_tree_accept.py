"""Phase 2: tree_accept against its oracle, to the last bit, and the walk of every bundle."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine import Acceptance, RequestStatus, tree_accept
from phases.rounds import ACCEPT_CASES, AcceptCase, Padded, arrays, differences

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kdtree_engine.bundle import Bundle
    from phases.places import Place

    Array = npt.NDArray[Any]
    Evidence = Callable[..., None]

OPS = ("tree_accept",)


def run(place: Place, **inputs: Any) -> dict[str, Array]:
    tensors = {name: place.given(value) for name, value in inputs.items()}
    return arrays(place, tree_accept(**tensors, library=place.library))


@pytest.mark.parametrize("case", ACCEPT_CASES, ids=str)
def test_equals_oracle(place: Place, kernel_name: str, case: AcceptCase, evidence: Evidence) -> None:
    assert not differences(case.run(place), case.answer())
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("form", ["argmax", "tokens"])
def test_walk_of_a_bundle(place: Place, kernel_name: str, bundle: Bundle, form: str, evidence: Evidence) -> None:
    """From the oracle's logits, and from its tokens."""
    assert bundle.expected is not None
    target: dict[str, Any] = {"target_tokens": bundle.expected.argmax}
    if form == "argmax":
        logits = place.given(bundle.expected.logits.copy())
        target = {"logits": logits}
    found = run(
        place,
        tokens=bundle.tree.tokens,
        parents=bundle.tree.parents,
        qo_indptr=bundle.request.qo_indptr,
        max_q_len=256,
        **target,
    )
    np.testing.assert_array_equal(found["status"], 0)
    np.testing.assert_array_equal(found["node_targets"], bundle.expected.argmax)
    np.testing.assert_array_equal(found["path_len"], bundle.expected.accepted_len)
    np.testing.assert_array_equal(found["bonus"], bundle.expected.bonus)
    for b, length in enumerate(bundle.expected.accepted_len):
        path = bundle.expected.accepted_path[bundle.accepted(b)]
        np.testing.assert_array_equal(found["path"][b, :length], path)
        np.testing.assert_array_equal(found["accept_index"][b, :length], bundle.nodes(b).start + path)
    evidence(kernel=kernel_name, bundle=bundle.name, equal=True)


def test_a_request_alone_or_in_company(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """Bad neighbours included."""
    case = AcceptCase((9,) * 80, "argmax", kind="bad")
    whole, inputs = case.run(place), case.inputs()
    width = inputs["tokens"].shape[1]
    for b in (0, 1, 3, 7, 40, 79):
        alone = {
            name: value[b : b + 1] if isinstance(value, np.ndarray) and name != "logits" else value
            for name, value in inputs.items()
        }
        alone["logits"] = inputs["logits"][b * width : (b + 1) * width].copy()
        one = run(place, **alone)
        one["accept_index"] = np.where(one["accept_index"] < 0, -1, one["accept_index"] + b * width)
        for name, array in one.items():
            np.testing.assert_array_equal(array[0], whole[name][b], err_msg=name)
    evidence(kernel=kernel_name)


@pytest.mark.parametrize(
    "case",
    [AcceptCase((9, 5), token_dtype="int64"), AcceptCase((7, 5), "argmax-bfloat16", vocab_size=77, ragged=True)],
    ids=str,
)
def test_only_the_outputs_are_written(place: Place, kernel_name: str, case: AcceptCase, evidence: Evidence) -> None:
    inputs = {name: place.given(value) for name, value in case.inputs().items()}
    bands = {name: Padded(place, array) for name, array in case.run(place).items()}
    out = Acceptance(**{name: band.tensor for name, band in bands.items()})
    tree_accept(**inputs, out=out, library=place.library)
    for band in bands.values():
        band.check()
    assert not differences(arrays(place, out), case.answer())
    for name, value in case.inputs().items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(place.array(inputs[name]), value)
    evidence(kernel=kernel_name)


def test_outputs_may_be_left_out(place: Place, kernel_name: str, evidence: Evidence) -> None:
    case = AcceptCase((9, 5))
    whole = case.run(place)
    needed = ("path", "path_len", "bonus", "status")
    inputs = {name: place.given(value) for name, value in case.inputs().items()}
    for extra in (None, *(set(whole) - set(needed))):
        tensors: dict[str, Any] = dict.fromkeys(Acceptance._fields)
        for name in (*needed, *([extra] if extra else [])):
            tensors[name] = place.given(np.zeros_like(whole[name]))
        tree_accept(**inputs, out=Acceptance(**tensors), library=place.library)
        for name, tensor in tensors.items():
            if tensor is not None:
                np.testing.assert_array_equal(place.array(tensor), whole[name], err_msg=name)
    evidence(kernel=kernel_name)


def test_rows_of_no_request_are_left_alone(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """A ragged batch in buffers that are larger: what lies behind it is neither read nor written."""
    case = AcceptCase((7, 5), "argmax", ragged=True)
    inputs, live = case.inputs(), 12
    for name in ("tokens", "parents"):
        inputs[name] = np.concatenate([inputs[name], np.full(9, -99, inputs[name].dtype)])
    inputs["logits"] = np.concatenate([inputs["logits"], np.full((9, case.vocab_size), np.nan, np.float32)])
    answer = case.answer()
    bands = {}
    for name, array in case.run(place).items():
        shape = (21,) if name in ("node_targets", "predicts") else array.shape
        bands[name] = Padded(place, np.zeros(shape, array.dtype))
    out = Acceptance(**{name: band.tensor for name, band in bands.items()})
    tree_accept(**{name: place.given(value) for name, value in inputs.items()}, out=out, library=place.library)
    found = arrays(place, out)
    for name in ("node_targets", "predicts"):
        assert (found[name][live:].copy().view(np.int8) == -17).all()
        found[name] = found[name][:live]
    assert not differences(found, answer)
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("bad", [(0, 9, 8), (-1, 5, 8), (0, 3, 99), (0, 8, 3)])
def test_row_bounds_that_make_no_sense(
    place: Place, kernel_name: str, bad: tuple[int, ...], evidence: Evidence
) -> None:
    """Falling bounds and bounds outside the rows; what is right beside them is accepted."""
    case = AcceptCase((3, 5), ragged=True)
    inputs = case.inputs() | {"qo_indptr": np.array(bad, np.int32), "max_q_len": 5}
    found = run(place, **inputs)
    for b, (start, stop) in enumerate(itertools.pairwise(bad)):
        wrong = not (0 <= start <= stop <= 8 and stop - start <= 5)
        assert (found["status"][b] == RequestStatus.SIZE_OUT_OF_RANGE) == wrong
        assert found["path_len"][b] == 0 or not wrong
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("values", ["all -inf", "+inf", "-nan", "all equal", "zeros of both signs"])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_unusual_logits(place: Place, kernel_name: str, values: str, dtype: Any, evidence: Evidence) -> None:
    """The most probable token in closed form."""
    vocab = 1000
    logits = np.zeros((1, vocab), np.float32)
    token, status = 0, 0
    if values == "all -inf":
        logits[:] = -math.inf
    elif values == "+inf":
        logits[0, [641, 900]] = math.inf
        token = 641
    elif values == "-nan":
        logits[0, 77] = np.array(0xFFC00000, np.uint32).view(np.float32)
        token, status = -1, RequestStatus.NOT_A_NUMBER
    elif values == "zeros of both signs":
        logits[0, ::2] = -0.0
    stored = logits if dtype == np.float32 else (logits.view(np.uint32) >> 16).astype(np.uint16)
    found = run(place, tokens=np.zeros((1, 1), np.int32), parents=np.full((1, 1), -1, np.int32), logits=stored)
    assert found["node_targets"].tolist() == [[token]]
    assert found["bonus"].tolist() == [token]
    assert found["status"].tolist() == [status]
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("place_of_best", [0, 1, 7, 8, 2047, 2048, 16383, 16384, 99_998, 99_999])
@pytest.mark.parametrize("rows", [1, 40])
def test_the_best_logit_wherever_it_is(
    place: Place, kernel_name: str, place_of_best: int, rows: int, evidence: Evidence
) -> None:
    """A single row is looked at by several blocks, many rows by one each; rows are not aligned."""
    vocab = 100_000
    logits = np.full((rows, vocab + 3), -1.0, np.float32)[:, :vocab]
    logits[:, place_of_best] = 1.0
    logits[:, place_of_best + 1 : place_of_best + 2] = 1.0
    nodes = {"tokens": np.zeros((1, rows), np.int32), "parents": np.arange(-1, rows - 1, dtype=np.int32)[None]}
    found = run(place, **nodes, logits=logits)
    np.testing.assert_array_equal(found["node_targets"], place_of_best)
    evidence(kernel=kernel_name)


def test_a_draw_is_the_inverse_of_the_cumulative_probability(
    place: Place, kernel_name: str, evidence: Evidence
) -> None:
    """Closed form: of 2^k equally probable tokens among impossible ones, u draws number floor(u 2^k)."""
    vocab, possible = 30_000, 1024
    rng = np.random.default_rng(20261202)
    where = np.sort(rng.choice(vocab, possible, replace=False))
    logits = np.full((64, vocab), -np.inf, np.float32)
    logits[:, where] = 3.5
    uniforms = ((rng.integers(0, possible, 64) + 0.5) / possible).astype(np.float32)
    uniforms[:2] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    nodes = {"tokens": np.zeros((1, 64), np.int32), "parents": np.arange(-1, 63, dtype=np.int32)[None]}
    found = run(place, **nodes, logits=logits, uniforms=uniforms[None], temperature=0.3)
    np.testing.assert_array_equal(found["node_targets"][0], where[(uniforms * possible).astype(int)])
    evidence(kernel=kernel_name)


def test_accepted_rows_of_two_requests(place: Place, kernel_name: str, evidence: Evidence) -> None:
    """The public report of scattered accepted nodes: request 0 keeps its root alone, request 1 nodes 0, 2 and 3."""
    found = run(
        place,
        tokens=np.array([[7, 10, 11, 12], [7, 10, 11, 12]]),
        retrive_next_token=np.array([[1, -1, 3, -1]] * 2),
        retrive_next_sibling=np.array([[-1, 2, -1, -1]] * 2),
        target_tokens=np.array([[99, 0, 0, 0], [11, 0, 12, 55]]),
        max_path=4,
    )
    assert found["accept_index"].tolist() == [[0, -1, -1, -1], [4, 6, 7, -1]]
    assert found["accept_token_num"].tolist() == [0, 2]
    assert found["predicts"].tolist() == [[99, 0, 0, 0], [11, 0, 12, 55]]
    assert found["bonus"].tolist() == [99, 55]
    evidence(kernel=kernel_name)


@pytest.mark.parametrize("form", ["parents", "links"])
def test_every_malformed_small_tree_ends(place: Place, kernel_name: str, form: str, evidence: Evidence) -> None:
    """All tables of parents, or links, of three nodes with entries from -2 to 3: each is walked or refused."""
    entries = np.array(list(itertools.product(range(-2, 4), repeat=3)), np.int32)
    shape = entries.shape
    tree = {"parents": entries}
    if form == "links":
        tree = {"retrive_next_token": entries, "retrive_next_sibling": entries[::-1].copy()}
    inputs = {"tokens": np.full(shape, 4, np.int32), "target_tokens": np.full(shape, 4, np.int32), **tree}
    found = run(place, **inputs)
    good = np.ones(len(entries), bool)
    for name, table in tree.items():
        for node in range(3):
            link = table[:, node]
            if name == "parents":
                good &= (link < 0) if node == 0 else (link >= 0) & (link < node)
            else:
                good &= (link == -1) | ((link > node) & (link < 3))
    np.testing.assert_array_equal(found["status"] == 0, good)
    np.testing.assert_array_equal(found["path_len"] > 0, good)
    evidence(kernel=kernel_name)
