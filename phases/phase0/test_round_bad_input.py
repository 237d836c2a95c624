"""Bad input to tree_build, tree_accept and kv_compact: one line that names the argument, never a crash or a stray read.

What is wrong with one request of many is not here: it is a status, and the oracle's cases have it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine import (
    KernelError,
    kv_compact,
    library,
    pool_addresses,
    tree_accept,
    tree_build,
)
from kdtree_engine.ops import kv_compact as compact_module
from kdtree_engine.ops import tree_accept as accept_module
from kdtree_engine.ops import tree_build as build_module
from kdtree_engine.ops.tree_accept import tree_accept_workspace_size

if TYPE_CHECKING:
    from collections.abc import Callable

OPS: dict[str, Callable[..., Any]] = {"tree_build": tree_build, "tree_accept": tree_accept, "kv_compact": kv_compact}
ARGS = {"tree_build": build_module._Args, "tree_accept": accept_module._Args, "kv_compact": compact_module._Args}


def ids(*shape: int) -> Any:
    return np.zeros(shape, np.int32)


def arguments(op: str) -> dict[str, Any]:
    """Valid arguments: two requests of three nodes."""
    if op == "tree_build":
        tokens = np.tile(np.arange(4, dtype=np.int32), (2, 5, 1))
        log_probs = np.zeros((2, 5, 4), np.float32)
        return {"log_probs": log_probs, "token_ids": tokens, "root_tokens": ids(2), "max_nodes": 3}
    if op == "tree_accept":
        parents = np.array([[-1, 0, 0]] * 2, np.int32)
        return {"tokens": ids(2, 3), "parents": parents, "target_tokens": ids(2, 3)}
    slots = np.arange(6, dtype=np.int32).reshape(2, 3)
    return {"pools": np.zeros((2, 8, 4), np.float32), "path": ids(2, 2), "path_len": ids(2) + 1, "node_slots": slots}


def refused(op: str, argument: str, *words: str, **changes: Any) -> None:
    given = {name: value for name, value in (arguments(op) | changes).items() if value is not ...}
    with pytest.raises(KernelError) as raised:
        OPS[op](**given)
    message = str(raised.value)
    assert raised.value.argument == argument, message
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("op", OPS)
def test_valid_arguments_pass(op: str) -> None:
    np.testing.assert_array_equal(OPS[op](**arguments(op)).status, 0)


LOGITS: dict[str, Any] = {"target_tokens": ..., "logits": np.zeros((2, 3, 8), np.float32)}
PAGES: dict[str, Any] = {"node_slots": ..., "page_table": ids(2, 2), "kv_lens": ids(2), "page_size": 4, "max_q_len": 3}

CASES: list[tuple[str, str, tuple[str, ...], dict[str, Any]]] = [
    ("tree_build", "log_probs", ("builtins.list",), {"log_probs": [0.0]}),
    ("tree_build", "log_probs", ("float64", "float32"), {"log_probs": np.zeros((2, 5, 4))}),
    ("tree_build", "log_probs", ("strides",), {"log_probs": np.zeros((2, 5, 8), np.float32)[..., ::2]}),
    ("tree_build", "log_probs", ("[10, 4]",), {"log_probs": np.zeros((10, 4), np.float32)}),
    ("tree_build", "token_ids", ("[2, 5, 3]", "max_width = 4"), {"token_ids": ids(2, 5, 3)}),
    ("tree_build", "token_ids", ("float32",), {"token_ids": np.zeros((2, 5, 4), np.float32)}),
    ("tree_build", "token_ids", ("NoneType",), {"token_ids": None}),
    ("tree_build", "root_tokens", ("int64", "int32"), {"root_tokens": np.zeros(2, np.int64)}),
    ("tree_build", "root_tokens", ("[3]", "batch = 2"), {"root_tokens": ids(3)}),
    ("tree_build", "max_nodes", ("0", "1..1025"), {"max_nodes": 0}),
    ("tree_build", "max_nodes", ("1026", "1..1025"), {"max_nodes": 1026}),
    ("tree_build", "max_nodes", ("builtins.float",), {"max_nodes": 3.5}),
    ("tree_build", "budgets", ("int64",), {"budgets": np.zeros(2, np.int64)}),
    ("tree_build", "widths", ("[1]",), {"widths": ids(1)}),
    ("tree_build", "seq_lens", ("uint8",), {"seq_lens": np.zeros(2, np.uint8)}),
    ("tree_build", "index_dtype", ("'int16'",), {"index_dtype": "int16"}),
    ("tree_accept", "tokens", ("float32",), {"tokens": np.zeros((2, 3), np.float32)}),
    ("tree_accept", "tokens", ("[6]",), {"tokens": ids(6)}),
    ("tree_accept", "parents", ("[2, 4]",), {"parents": ids(2, 4)}),
    ("tree_accept", "parents", ("null",), {"parents": None}),
    (
        "tree_accept",
        "retrive_next_token",
        ("beside parents",),
        {"retrive_next_token": ids(2, 3), "retrive_next_sibling": ids(2, 3)},
    ),
    ("tree_accept", "retrive_next_sibling", ("null",), {"parents": None, "retrive_next_token": ids(2, 3)}),
    ("tree_accept", "target_tokens", ("None",), {"target_tokens": None}),
    ("tree_accept", "target_tokens", ("int64",), {"target_tokens": np.zeros((2, 3), np.int64)}),
    ("tree_accept", "target_tokens", ("from logits",), {"logits": LOGITS["logits"]}),
    ("tree_accept", "uniforms", ("without logits",), {"uniforms": np.zeros((2, 3), np.float32)}),
    ("tree_accept", "uniforms", ("float64",), LOGITS | {"uniforms": np.zeros((2, 3))}),
    ("tree_accept", "logits", ("float16",), LOGITS | {"logits": np.zeros((2, 3, 8), np.float16)}),
    ("tree_accept", "logits", ("[5, 8]", "6 rows"), LOGITS | {"logits": np.zeros((5, 8), np.float32)}),
    ("tree_accept", "logits", ("strides",), LOGITS | {"logits": np.zeros((2, 3, 16), np.float32)[..., ::2]}),
    ("tree_accept", "vocab_size", ("0",), LOGITS | {"logits": np.zeros((2, 3, 0), np.float32)}),
    ("tree_accept", "temperature", ("builtins.str",), LOGITS | {"temperature": "hot"}),
    *(
        (
            "tree_accept",
            "temperature",
            ("finite", "argmax"),
            LOGITS | {"uniforms": np.zeros((2, 3), np.float32), "temperature": value},
        )
        for value in (0.0, -1.0, np.nan, np.inf)
    ),
    ("tree_accept", "max_path", ("0", "1..1025"), {"max_path": 0}),
    ("tree_accept", "max_path", ("2000",), {"max_path": 2000}),
    ("tree_accept", "max_q_len", ("4", "leave it out"), {"max_q_len": 4}),
    ("tree_accept", "num_nodes", ("beside qo_indptr",), {"tokens": ids(6), "qo_indptr": ids(3), "num_nodes": ids(2)}),
    ("tree_accept", "parents", ("[2, 3]", "[total_q]"), {"tokens": ids(6), "qo_indptr": ids(3)}),
    (
        "tree_accept",
        "qo_indptr",
        ("[0]", "[batch + 1]"),
        {"tokens": ids(6), "parents": ids(6), "target_tokens": ids(6), "qo_indptr": ids(0)},
    ),
    (
        "tree_accept",
        "batch",
        ("0",),
        {"tokens": ids(6), "parents": ids(6), "target_tokens": ids(6), "qo_indptr": ids(1)},
    ),
    ("tree_accept", "workspace", ("float32", "uint8"), {"workspace": np.zeros(99, np.float32)}),
    ("tree_accept", "workspace", ("8 bytes", "expected 48"), LOGITS | {"workspace": np.zeros(8, np.uint8)}),
    ("kv_compact", "pools", ("no layers",), {"pools": []}),
    ("kv_compact", "pools", ("[8]",), {"pools": np.zeros(8, np.float32)}),
    ("kv_compact", "pools", ("strides",), {"pools": np.zeros((2, 8, 8), np.float32)[..., ::2]}),
    ("kv_compact", "pools", ("layer 1",), {"pools": [np.zeros((8, 4), np.float32), np.zeros((7, 4), np.float32)]}),
    ("kv_compact", "pools", ("layer 1",), {"pools": [np.zeros((8, 4), np.float32), np.zeros((8, 5), np.float32)]}),
    ("kv_compact", "pools", ("float64",), {"pools": [np.zeros((8, 4), np.float32), np.zeros((8, 4))]}),
    ("kv_compact", "num_slots", ("0",), {"pools": np.zeros((2, 0, 4), np.float32)}),
    ("kv_compact", "row_bytes", ("0",), {"pools": np.zeros((2, 8, 0), np.float32)}),
    ("kv_compact", "row_bytes", ("80000",), {"pools": np.zeros((2, 8, 20000), np.float32)}),
    ("kv_compact", "num_layers", ("0",), {"pools": np.zeros((0, 8, 4), np.float32)}),
    (
        "kv_compact",
        "layer_stride",
        ("0",),
        {"pools": np.lib.stride_tricks.as_strided(np.zeros((8, 4), np.float32), (2, 8, 4), (0, 16, 4))},
    ),
    (
        "kv_compact",
        "slot_stride",
        ("0",),
        {"pools": np.lib.stride_tricks.as_strided(np.zeros((8, 4), np.float32), (1, 8, 4), (128, 0, 4))},
    ),
    ("kv_compact", "addresses", ("beside one tensor",), {"addresses": np.zeros(2, np.int64)}),
    ("kv_compact", "path", ("int64",), {"path": np.zeros((2, 2), np.int64)}),
    ("kv_compact", "path", ("NoneType",), {"path": None}),
    ("kv_compact", "path_len", ("[3]",), {"path_len": ids(3)}),
    ("kv_compact", "node_slots", ("either", "page_table"), {"node_slots": None}),
    ("kv_compact", "node_slots", ("page_table",), {"page_table": ids(2, 2), "kv_lens": ids(2)}),
    ("kv_compact", "node_slots", ("[3, 3]",), {"node_slots": ids(3, 3)}),
    ("kv_compact", "kv_lens", ("beside node_slots",), {"kv_lens": ids(2)}),
    ("kv_compact", "kv_lens", ("NoneType",), PAGES | {"kv_lens": None}),
    ("kv_compact", "max_q_len", ("NoneType",), PAGES | {"max_q_len": None}),
    ("kv_compact", "max_q_len", ("0",), PAGES | {"max_q_len": 0}),
    ("kv_compact", "page_size", ("0",), PAGES | {"page_size": 0}),
    ("kv_compact", "page_table", ("[2]",), PAGES | {"page_table": ids(2)}),
    ("kv_compact", "page_table", ("strides",), PAGES | {"page_table": ids(2, 4)[:, ::2]}),
    ("kv_compact", "page_table", ("float32",), PAGES | {"page_table": np.zeros((2, 2), np.float32)}),
]


@pytest.mark.parametrize(("op", "argument", "words", "changes"), CASES)
def test_wrong_argument(op: str, argument: str, words: tuple[str, ...], changes: dict[str, Any]) -> None:
    refused(op, argument, *words, **changes)


@pytest.mark.parametrize("op", OPS)
def test_every_output_is_checked(op: str) -> None:
    """Of another type, of another shape, and read-only; those that the interface calls optional may be left out."""
    right = OPS[op](**arguments(op))
    kept = {
        "tree_build": ("tokens", "parents", "num_nodes", "status"),
        "tree_accept": ("path", "path_len", "bonus", "status"),
    }
    for name, tensor in right._asdict().items():
        refused(op, name, "float64", out=right._replace(**{name: tensor.astype(np.float64)}))
        refused(op, name, "shape", out=right._replace(**{name: np.zeros((7, *tensor.shape), tensor.dtype)}))
        frozen = tensor.copy()
        frozen.flags.writeable = False
        refused(op, name, "read-only", out=right._replace(**{name: frozen}))
        without = right._replace(**{name: None})
        if name in kept.get(op, ("status",)):
            refused(op, name, "NoneType", out=without)
        else:
            again = OPS[op](**arguments(op), out=without)
            assert again is without
            np.testing.assert_array_equal(again.status, 0)


def test_read_only_pools() -> None:
    pools = arguments("kv_compact")["pools"]
    pools.flags.writeable = False
    refused("kv_compact", "pools", "read-only", pools=pools)
    refused("kv_compact", "pools", "read-only", pools=list(pools))


def test_addresses_of_layers() -> None:
    with pytest.raises(KernelError, match="no layers"):
        pool_addresses([])
    with pytest.raises(KernelError, match=r"builtins\.list"):
        pool_addresses([[1]])
    pools = list(arguments("kv_compact")["pools"])
    refused("kv_compact", "layer_pools", "[3]", pools=pools, addresses=np.zeros(3, np.int64))
    assert pool_addresses(pools).tolist() == [pool.ctypes.data for pool in pools]


def test_workspace_size_of_an_unknown_target() -> None:
    with pytest.raises(KernelError, match="'greedy', expected one of tokens, argmax, sample"):
        tree_accept_workspace_size(total_q=4, target="greedy", library=library("host"))
    with pytest.raises(KernelError, match="total_q"):
        tree_accept_workspace_size(total_q=0, vocab_size=4, library=library("host"))


class Raw:
    """The C interface itself, with valid arguments to be spoiled one at a time."""

    def __init__(self, op: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.op, self.host = op, library("host")
        self.given = {name: value for name, value in (arguments(op) | changes).items() if value is not ...}
        seen: list[tuple[str, bytes]] = []
        monkeypatch.setattr(type(self.host), "call", lambda _self, name, args, _: seen.append((name, bytes(args._obj))))
        self.out = OPS[op](**self.given)
        monkeypatch.undo()
        self.args = ARGS[op].from_buffer_copy(dict(seen)[op])
        for tensor in self.out:
            tensor.fill(7)

    def call(self) -> None:
        self.host.call(self.op, ctypes.byref(self.args), None)

    def refused(self, argument: str, *words: str) -> None:
        with pytest.raises(KernelError) as raised:
            self.call()
        message = str(raised.value)
        assert raised.value.argument == argument, message
        for word in words:
            assert word in message
        for tensor in self.out:
            assert (tensor == 7).all(), "a refused call wrote its output"


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "tree_build": ("tree_build", {"budgets": ids(2), "num_depths": ids(2), "widths": ids(2) + 1, "seq_lens": ids(2)}),
    "tokens": ("tree_accept", {"num_nodes": ids(2)}),
    "links": (
        "tree_accept",
        {"parents": ..., "retrive_next_token": ids(2, 3) - 1, "retrive_next_sibling": ids(2, 3) - 1},
    ),
    "ragged": (
        "tree_accept",
        {"tokens": ids(6), "parents": ids(6) - 1, "target_tokens": ids(6), "qo_indptr": np.array([0, 3, 6], np.int32)},
    ),
    "slots": ("kv_compact", {"num_nodes": ids(2) + 3}),
    "pages": ("kv_compact", PAGES),
}
OPTIONAL = {
    *("budgets", "num_depths", "widths", "seq_lens", "depths", "positions", "visibility", "visibility_bits"),
    *("retrive_index", "num_nodes", "node_targets", "accept_index", "accept_token_num", "predicts", "workspace"),
    *("committed_slots", "free_slots", "num_free"),
}


@pytest.mark.parametrize("form", FORMS)
def test_pointers(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pointer that is given: null, unless it may be, and off by one byte."""
    op, changes = FORMS[form]
    pointers = [str(field[0]) for field in ARGS[op]._fields_ if field[1] is ctypes.c_void_p]
    tried = 0
    for name in pointers:
        raw = Raw(op, monkeypatch, **changes)
        address = getattr(raw.args, name)
        if address is None:
            continue
        tried += 1
        optional = OPTIONAL - {"num_nodes"} if op == "tree_build" else OPTIONAL
        links = {"retrive_next_token", "retrive_next_sibling"} if op == "tree_build" else set()
        if name not in optional | links:
            setattr(raw.args, name, None)
            raw.refused({"page_table": "node_slots", "qo_indptr": "total_q"}.get(name, name), "got")
        if name not in ("pool", "visibility", "workspace"):
            setattr(raw.args, name, address + 1)
            raw.refused(name, "aligned")
    assert tried > len(pointers) // 2
