"""Bad input to op merge_partials: always one line that names the argument, never a crash or a stray read."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kdtree_engine import KernelError, library, merge_partials
from kdtree_engine.ops.merge_partials import _Args


def arguments() -> dict[str, Any]:
    """Valid arguments; ones, since only their form matters here."""
    return {"outs": np.ones((2, 3, 4, 512), np.uint16), "lses": np.ones((2, 3, 4), np.float32)}


def refused(argument: str, *words: str, **changes: Any) -> None:
    with pytest.raises(KernelError) as raised:
        merge_partials(**(arguments() | changes))
    message = str(raised.value)
    assert raised.value.argument == argument, message
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("outs", np.ones((2, 3, 4, 512), np.float16), ("float16", "bfloat16", "float32")),
        ("outs", np.ones((2, 3, 4, 512), ">f4"), (">f4",)),
        ("outs", np.ones((2, 3, 4, 1024), np.float32)[..., ::2], ("strides",)),
        ("outs", np.float32(1), ("numpy.float32",)),
        ("outs", [1.0], ("builtins.list",)),
        ("outs", np.ones((), np.float32), ("shape []", "[parts, d_latent]")),
        ("outs", np.ones(512, np.float32), ("shape [512]", "[parts, d_latent]")),
        ("lses", None, ("NoneType",)),
        ("lses", [1.0], ("builtins.list",)),
        ("lses", np.ones((2, 3, 4)), ("float64", "float32")),
        ("lses", np.ones((2, 3, 8), np.float32)[..., ::2], ("strides",)),
        ("lses", np.ones((3, 3, 4), np.float32), ("[3, 3, 4]", "parts = 2 (set by outs)")),
        ("lses", np.ones((2, 3, 5), np.float32), ("[2, 3, 5]", "row1 = 4")),
        ("lses", np.ones((2, 12), np.float32), ("[2, 12]", "[parts, row0, row1]")),
        ("out", np.ones((3, 4, 512)), ("float64", "bfloat16")),
        ("out", np.ones((3, 4, 256), np.float32), ("[3, 4, 256]", "d_latent = 512")),
        ("out", np.ones((2, 3, 4, 512), np.float32), ("[row0, row1, d_latent]",)),
        ("lse", np.ones((3, 4)), ("float64",)),
        ("lse", np.ones(3, np.float32), ("[row0, row1]",)),
        ("out_dtype", "float16", ("'float16'", "bfloat16 or float32")),
        ("out_dtype", 1, ("got 1",)),
    ],
)
def test_wrong_tensor(argument: str, value: object, words: tuple[str, ...]) -> None:
    refused(argument, *words, **{argument: value})


def test_out_of_another_type_than_out_dtype() -> None:
    refused("out", "float32", "bfloat16", out=np.ones((3, 4, 512), np.float32), out_dtype="bfloat16")


@pytest.mark.parametrize("name", ["out", "lse"])
def test_read_only_output(name: str) -> None:
    read_only = np.ones((3, 4, 512) if name == "out" else (3, 4), np.float32)
    read_only.flags.writeable = False
    refused(name, "read-only", **{name: read_only})


@pytest.mark.parametrize(
    ("argument", "shape"),
    [
        ("num_parts", (0, 3, 512)),
        ("num_parts", (1025, 1, 512)),
        ("num_rows", (2, 0, 512)),
        ("d_latent", (2, 3, 0)),
        ("d_latent", (2, 3, 128)),
        ("d_latent", (2, 3, 576)),
    ],
)
def test_size_out_of_range(argument: str, shape: tuple[int, ...]) -> None:
    refused(argument, "expected", outs=np.ones(shape, np.float32), lses=np.ones(shape[:-1], np.float32))


class Raw:
    """The C interface itself, with valid arguments to be spoiled one at a time."""

    def __init__(self) -> None:
        self.outs, self.lses = arguments().values()
        self.out = np.full((3, 4, 512), 7.0, np.float32)
        self.lse = np.full((3, 4), 7.0, np.float32)
        self.args = _Args(
            struct_size=ctypes.sizeof(_Args),
            outs=self.outs.ctypes.data,
            lses=self.lses.ctypes.data,
            out=self.out.ctypes.data,
            lse=self.lse.ctypes.data,
            num_parts=2,
            num_rows=12,
            d_latent=512,
            in_type=0,
            out_type=1,
        )

    def call(self) -> None:
        library("host").call("merge_partials", ctypes.byref(self.args), None)

    def refused(self, argument: str, *words: str) -> None:
        with pytest.raises(KernelError) as raised:
            self.call()
        assert raised.value.argument == argument
        for word in words:
            assert word in str(raised.value)
        assert (self.out == 7.0).all(), "a refused call wrote its output"
        assert (self.lse == 7.0).all(), "a refused call wrote its output"


def test_lse_may_be_left_out() -> None:
    raw = Raw()
    raw.args.lse = None
    raw.call()
    assert (raw.lse == 7.0).all()
    # Equal parts: each row is theirs, the smallest bfloat16.
    assert (raw.out == np.float32(2.0**-133)).all()


@pytest.mark.parametrize("name", ["outs", "lses", "out"])
def test_null_pointer(name: str) -> None:
    raw = Raw()
    setattr(raw.args, name, None)
    raw.refused(name, "null pointer")


@pytest.mark.parametrize(("name", "offset"), [("outs", 8), ("lses", 2), ("out", 4), ("lse", 1)])
def test_misaligned_pointer(name: str, offset: int) -> None:
    raw = Raw()
    setattr(raw.args, name, getattr(raw.args, name) + offset)
    raw.refused(name, "aligned to")


@pytest.mark.parametrize("name", ["in_type", "out_type"])
@pytest.mark.parametrize("value", [-1, 2])
def test_unknown_type(name: str, value: int) -> None:
    raw = Raw()
    setattr(raw.args, name, value)
    raw.refused(name, f"got {value}", "0 (bfloat16), 1 (float32)")


def test_more_rows_than_there_may_be() -> None:
    raw = Raw()
    raw.args.num_rows = 2**31
    raw.refused("num_rows", "expected 1..2147483647")


@pytest.mark.parametrize("change", [-8, 8])
def test_struct_of_another_abi(change: int) -> None:
    raw = Raw()
    raw.args.struct_size += change
    raw.refused("struct_size", "ABI version", "rebuild")


def test_null_args() -> None:
    with pytest.raises(KernelError) as raised:
        library("host").call("merge_partials", None, None)
    assert raised.value.argument == "args"
