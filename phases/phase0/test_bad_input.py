"""Bad input to op verify_attn: always one line that names the argument, never a crash or a stray read."""

from __future__ import annotations

import ctypes
import math
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine import KernelError, library, verify_attn
from kdtree_engine.ops.verify_attn import _Args
from phases import host_build

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KERNELS = [info.name for info in library("host").kernels if info.op == "verify_attn"]


def arguments(batch: int = 2, q_len: int = 3, num_heads: int = 4, kv_len: int = 70) -> dict[str, Any]:
    """Valid arguments of the Python wrapper; ones, since only their form matters here."""
    return {
        "q": np.ones((batch, q_len, num_heads, 576), np.float32),
        "kv": np.ones((batch, kv_len, 576), np.float32),
        "mask": np.ones((batch, q_len, kv_len), np.uint8),
        "kv_len": np.full(batch, kv_len, np.int32),
        "sm_scale": 0.1,
    }


def refused(argument: str, *words: str, **changes: Any) -> None:
    with pytest.raises(KernelError) as raised:
        verify_attn(**(arguments() | changes))
    message = str(raised.value)
    assert raised.value.argument == argument, message
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", ["q", "kv", "mask", "kv_len"])
def test_wrong_dtype(name: str) -> None:
    refused(name, "float16", **{name: arguments()[name].astype(np.float16)})


def test_byte_swapped_dtype() -> None:
    refused("kv", ">f4", kv=arguments()["kv"].astype(">f4"))


@pytest.mark.parametrize("name", ["q", "kv", "mask"])
def test_wrong_stride(name: str) -> None:
    tensor = arguments()[name]
    refused(name, "strides", **{name: np.repeat(tensor, 2, axis=1)[:, ::2]})


@pytest.mark.parametrize("name", ["kv", "mask", "kv_len"])
def test_wrong_kind(name: str) -> None:
    refused(name, "builtins.list", **{name: arguments()[name].tolist()})


def test_q_of_no_known_kind() -> None:
    refused("q", "builtins.list", q=[1.0])


@pytest.mark.parametrize(
    ("name", "shape", "axis"),
    [
        ("q", (2, 3, 576), "num_heads"),
        ("kv", (3, 70, 576), "batch"),
        ("kv", (2, 70, 575), "d_qk"),
        ("mask", (2, 3, 71), "kv_len"),
        ("mask", (2, 4, 70), "q_len"),
        ("kv_len", (3,), "batch"),
    ],
)
def test_wrong_shape(name: str, shape: tuple[int, ...], axis: str) -> None:
    refused(name, axis, str(list(shape)), **{name: np.ones(shape, arguments()[name].dtype)})


@pytest.mark.parametrize("name", ["out", "lse"])
def test_wrong_output(name: str) -> None:
    shape = (2, 3, 4, 512) if name == "out" else (2, 3, 4)
    refused(name, "float64", **{name: np.empty(shape, np.float64)})
    refused(name, "num_heads", **{name: np.empty((*shape[:2], 5, *shape[3:]), np.float32)})
    read_only = np.empty(shape, np.float32)
    read_only.flags.writeable = False
    refused(name, "read-only", **{name: read_only})


@pytest.mark.parametrize("sm_scale", [math.nan, math.inf, -math.inf, 0.0, -0.1])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sm_scale_out_of_range(sm_scale: float, kernel: str) -> None:
    refused("sm_scale", "finite", sm_scale=sm_scale, kernel=kernel)


def test_sm_scale_is_mandatory() -> None:
    without = arguments()
    del without["sm_scale"]
    with pytest.raises(TypeError, match="sm_scale"):
        verify_attn(**without)
    refused("sm_scale", "NoneType", sm_scale=None)


@pytest.mark.parametrize(("d_latent", "d_qk"), [(512, 575), (512, 640), (128, 192), (576, 576), (256, 256)])
def test_unknown_geometry(d_latent: int, d_qk: int) -> None:
    refused(
        "d_latent/d_rope",
        "512/64",
        q=np.ones((2, 3, 4, d_qk), np.float32),
        kv=np.ones((2, 70, d_qk), np.float32),
        d_latent=d_latent,
    )


@pytest.mark.parametrize("split_tokens", [-64, 1, 63, 65])
def test_bad_split_tokens(split_tokens: int) -> None:
    refused("split_tokens", "multiple of 64", split_tokens=split_tokens)


def test_split_tokens_of_a_wrong_kind() -> None:
    refused("split_tokens", "float", split_tokens=64.0)


@pytest.mark.parametrize("kernel", ["", "verify_attn_paged", "tree_build", "../verify_attn"])
def test_unknown_kernel(kernel: str) -> None:
    refused("kernel", "verify_attn_flash", kernel=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("argument", "shape"),
    [
        ("batch", {"batch": 0}),
        ("q_len", {"q_len": 0}),
        ("q_len", {"q_len": 257}),
        ("num_heads", {"num_heads": 0}),
        ("num_heads", {"num_heads": 129}),
        ("kv_len", {"kv_len": 0}),
        ("kv_len", {"kv_len": 262145, "batch": 1, "q_len": 1, "num_heads": 1}),
    ],
)
def test_size_out_of_range(argument: str, shape: dict[str, int], kernel: str) -> None:
    with pytest.raises(KernelError) as raised:
        verify_attn(**arguments(**shape), kernel=kernel)
    assert raised.value.argument == argument
    assert "expected 1.." in str(raised.value)


class Raw:
    """The C interface itself, with valid arguments to be spoiled one at a time."""

    def __init__(self) -> None:
        self.library = library("host")
        self.tensors = arguments()
        self.out = np.full((2, 3, 4, 512), 7.0, np.float32)
        self.lse = np.full((2, 3, 4), 7.0, np.float32)
        self.args = _Args(
            struct_size=ctypes.sizeof(_Args),
            q=self.tensors["q"].ctypes.data,
            kv=self.tensors["kv"].ctypes.data,
            mask=self.tensors["mask"].ctypes.data,
            kv_lens=self.tensors["kv_len"].ctypes.data,
            out=self.out.ctypes.data,
            lse=self.lse.ctypes.data,
            batch=2,
            q_len=3,
            num_heads=4,
            kv_len=70,
            d_latent=512,
            d_rope=64,
            split_tokens=64,
            sm_scale=0.1,
        )
        size = ctypes.c_size_t()
        self.library.call("verify_attn_workspace_size", ctypes.byref(self.args), ctypes.byref(size))
        self.workspace = np.zeros(size.value + 16, np.uint8)
        self.args.workspace = self.workspace.ctypes.data
        self.args.workspace_size = size.value

    def refused(self, kernel: str, argument: str, *words: str) -> None:
        with pytest.raises(KernelError) as raised:
            self.library.call(kernel, ctypes.byref(self.args), None)
        assert raised.value.argument == argument
        for word in words:
            assert word in str(raised.value)
        assert (self.out == 7.0).all(), "a refused call wrote its output"
        assert (self.lse == 7.0).all(), "a refused call wrote its output"


@pytest.mark.parametrize("kernel", KERNELS)
def test_valid_arguments_pass(kernel: str) -> None:
    raw = Raw()
    raw.library.call(kernel, ctypes.byref(raw.args), None)
    # Equal keys: every row is the mean of ones, and lse = 0.1 * 576 + ln 70.
    np.testing.assert_allclose(raw.out, 1.0, rtol=1e-6)
    np.testing.assert_allclose(raw.lse, 57.6 + math.log(70), rtol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["q", "kv", "out", "lse"])
def test_null_pointer(kernel: str, name: str) -> None:
    raw = Raw()
    setattr(raw.args, name, None)
    raw.refused(kernel, name, "null pointer")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["q", "kv", "out"])
def test_misaligned_pointer(kernel: str, name: str) -> None:
    raw = Raw()
    setattr(raw.args, name, getattr(raw.args, name) + 4)
    raw.refused(kernel, name, "aligned to 16 bytes")


@pytest.mark.parametrize("kernel", KERNELS)
def test_null_args(kernel: str) -> None:
    with pytest.raises(KernelError) as raised:
        library("host").call(kernel, None, None)
    assert raised.value.argument == "args"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("change", [-8, 8])
def test_struct_of_another_abi(kernel: str, change: int) -> None:
    raw = Raw()
    raw.args.struct_size += change
    raw.refused(kernel, "struct_size", "ABI version", "rebuild")


def test_workspace_too_small() -> None:
    raw = Raw()
    assert raw.args.workspace_size > 0
    raw.args.workspace_size -= 1
    raw.refused("verify_attn_flash", "workspace", "workspace_size")
    raw.args.workspace_size += 1
    raw.args.workspace = None
    raw.refused("verify_attn_flash", "workspace", "got 0 bytes")


def test_workspace_query_without_a_place_for_the_answer() -> None:
    with pytest.raises(KernelError) as raised:
        library("host").call("verify_attn_workspace_size", ctypes.byref(Raw().args), None)
    assert raised.value.argument == "bytes"


@pytest.mark.parametrize("kernel", KERNELS)
def test_lengths_outside_the_tensor_are_clamped(kernel: str) -> None:
    given = arguments()
    given["kv_len"] = np.array([-5, 2**31 - 1], np.int32)
    out, lse = verify_attn(**given, kernel=kernel)
    assert (out[0] == 0.0).all()
    assert (lse[0] == -math.inf).all()
    np.testing.assert_allclose(out[1], 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("int kdtree_abi_version(void) { return 999; }", ("ABI version 999", "rebuild")),
        ("int something_else(void) { return 0; }", ("not a kdtree library",)),
    ],
)
def test_foreign_library(source: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "libforeign.so"
    command = [host_build.compiler(), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=f'extern "C" {source}', text=True, check=True)
    with pytest.raises(KernelError) as raised:
        library(path)
    assert raised.value.argument == "library"
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("make", [lambda path: path.write_text("no library"), lambda path: None])
def test_unloadable_library(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "libkdtree_host.so"
    make(path)
    with pytest.raises(KernelError) as raised:
        library(path)
    assert raised.value.argument == "library"
    assert "nox -s build" in str(raised.value)


def test_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDTREE_ENGINE_LIBRARY", raising=False)
    monkeypatch.setenv("KDTREE_ENGINE_LIBRARY_DIR", str(tmp_path))
    monkeypatch.setattr("kdtree_engine._native.__file__", str(tmp_path / "_native.py"))
    with pytest.raises(KernelError, match="nox -s build"):
        library("cuda")


def test_unknown_place() -> None:
    with pytest.raises(KernelError, match="host, cuda"):
        library("tpu")  # type: ignore[arg-type]
