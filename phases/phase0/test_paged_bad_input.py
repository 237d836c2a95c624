"""Bad input to op verify_attn_paged: always one line that names the argument, never a crash, outputs untouched."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kdtree_engine import KernelError, library, verify_attn_paged
from kdtree_engine.ops.verify_attn_paged import _Args

ROWS, HEADS, WIDTH, SLOTS = 3, 2, 576, 32
POISON = 0x7FC0


def aligned(shape: tuple[int, ...], dtype: Any, fill: int = 1) -> Any:
    """An array that begins at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.zeros(size + 64, np.uint8)
    array = buffer[-buffer.ctypes.data % 64 :][:size].view(dtype).reshape(shape)
    array[...] = fill
    return array


def arguments() -> dict[str, Any]:
    """Valid arguments; ones, since only their form matters here."""
    return {
        "q": aligned((ROWS, HEADS, WIDTH), np.uint16),
        "kv_pool": aligned((SLOTS, WIDTH), np.uint16),
        "draft_kv": aligned((ROWS, WIDTH), np.uint16),
        "qo_indptr": np.array([0, ROWS], np.int32),
        "kv_indptr": np.array([0, 5], np.int32),
        "kv_indices": np.arange(5, dtype=np.int64),
        "mask": np.ones((ROWS, ROWS), bool),
        "sm_scale": 0.1,
        "out": aligned((ROWS, HEADS, 512), np.uint16, POISON),
        "lse": aligned((ROWS, HEADS), np.float32, 7),
    }


def refused(argument: str, words: tuple[str, ...], changes: dict[str, Any]) -> None:
    given = arguments() | changes
    with pytest.raises(KernelError) as raised:
        verify_attn_paged(**given)
    message = str(raised.value)
    assert raised.value.argument == argument, message
    assert "\n" not in message
    for word in words:
        assert word in message
    if "out" not in changes:
        assert (given["out"] == POISON).all()
    if "lse" not in changes:
        assert (given["lse"] == 7).all()


PAGES = {
    "kv_indptr": None,
    "kv_indices": None,
    "page_table": np.zeros((1, 2), np.int32),
    "kv_lens": np.array([5], np.int32),
    "page_size": 16,
}


@pytest.mark.parametrize(
    ("argument", "words", "changes"),
    [
        ("q", ("float32", "bfloat16"), {"q": np.ones((ROWS, HEADS, WIDTH), np.float32)}),
        ("q", ("[3, 576]",), {"q": aligned((ROWS, WIDTH), np.uint16)}),
        ("q", ("strides",), {"q": aligned((ROWS, HEADS, 2 * WIDTH), np.uint16)[..., ::2]}),
        ("q", ("16 bytes",), {"q": aligned((ROWS, HEADS, WIDTH + 8), np.uint16)[..., 1 : WIDTH + 1]}),
        ("q_stride_head", ("580", "multiple of 8"), {"q": aligned((ROWS, HEADS, 580), np.uint16)[..., :WIDTH]}),
        ("d_latent/d_rope", ("508/68",), {"d_latent": 508, "out": None}),
        ("kv_pool", ("[32, 512]",), {"kv_pool": aligned((SLOTS, 512), np.uint16)}),
        ("kv_pool", ("pages that follow",), {"kv_pool": aligned((4, 9, WIDTH), np.uint16)[:, :8]}),
        ("kv_stride", ("580",), {"kv_pool": aligned((SLOTS, 580), np.uint16)[:, :WIDTH]}),
        ("draft_kv", ("draft_slots",), {"draft_kv": None}),
        ("draft_slots", ("beside draft_kv",), {"draft_slots": np.zeros(ROWS, np.int32)}),
        ("draft_kv", ("4",), {"draft_kv": aligned((4, WIDTH), np.uint16)}),
        ("qo_indptr", ("int16",), {"qo_indptr": np.array([0, 3], np.int16)}),
        ("qo_indptr", ("[]",), {"qo_indptr": np.array(0, np.int32)}),
        ("batch", ("got 0", "1..512"), {"qo_indptr": np.zeros(1, np.int32), "kv_indptr": np.zeros(1, np.int32)}),
        ("kv_indptr", ("batch+1 = 2",), {"kv_indptr": np.zeros(3, np.int32)}),
        ("kv_indptr", ("page_table",), {"kv_indptr": None, "kv_indices": None}),
        ("kv_indices", ("kv_indptr",), {"kv_indices": None}),
        ("kv_indices", ("float64",), {"kv_indices": np.zeros(5)}),
        ("page_table", ("beside kv_indptr",), {"page_table": np.zeros((1, 2), np.int32)}),
        ("kv_lens", ("page_table",), PAGES | {"kv_lens": None}),
        ("page_size", ("got 17", "16, 32, 64, 128 or 256"), PAGES | {"page_size": 17}),
        ("page_size", ("got 16", "expected 1"), {"page_size": 16}),
        ("num_slots", ("multiple of page_size 64",), PAGES | {"page_size": 64}),
        ("mask", ("int64",), {"mask": np.ones((ROWS, ROWS), np.int64)}),
        ("parents", ("beside mask",), {"parents": np.zeros(ROWS, np.int32)}),
        ("mask_bits", ("words",), {"mask": None, "mask_bits": np.zeros(ROWS, np.uint64)}),
        ("mask_stride", ("got 5", "1..4"), {"mask": None, "mask_bits": np.zeros((ROWS, 5), np.uint64)}),
        ("mask_indptr", ("int32", "int64"), {"mask_indptr": np.zeros(2, np.int32)}),
        ("mask_indptr", ("byte mask",), {"mask": None, "mask_indptr": np.zeros(2, np.int64)}),
        ("sm_scale", ("got 0",), {"sm_scale": 0.0}),
        ("sm_scale", ("nan",), {"sm_scale": float("nan")}),
        ("sm_scale", ("builtins.str",), {"sm_scale": "1"}),
        ("logit_cap", ("got -1",), {"logit_cap": -1.0}),
        ("split_tokens", ("got 24", "multiple of 16"), {"split_tokens": 24}),
        ("max_q_len", ("got 257", "1..256"), {"max_q_len": 257}),
        ("max_kv_len", ("got 262145",), {"max_kv_len": 262145}),
        ("out_dtype", ("float16",), {"out_dtype": "float16"}),
        ("out", ("float32", "bfloat16"), {"out": np.zeros((ROWS, HEADS, 512), np.float32)}),
        ("lse", ("[3, 3]",), {"lse": np.zeros((ROWS, 3), np.float32)}),
        ("workspace", ("got 16 bytes",), {"workspace": aligned((16,), np.uint8)}),
        ("kernel", ("verify_attn_flash_paged",), {"kernel": "verify_attn"}),
    ],
)
def test_wrong_argument(argument: str, words: tuple[str, ...], changes: dict[str, Any]) -> None:
    refused(argument, words, changes)


def test_the_arguments_are_valid() -> None:
    """Without a change the call works, so that it is the change that is refused."""
    out, lse = verify_attn_paged(**arguments())
    assert (out == 1).all()  # all rows are the same
    assert np.isfinite(lse).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("struct_size", 8),
        ("q", None),
        ("out", 8),
        ("lse", None),
        ("qo_indptr_type", 2),
        ("kv_indices_type", -1),
        ("visibility_type", 5),
        ("out_type", 2),
        ("num_slots", 0),
        ("mask_size", -1),
    ],
)
def test_c_interface_refuses(field: str, value: int | None) -> None:
    """The raw structure, with one field spoiled."""
    given = arguments()
    host = library("host")
    size = ctypes.c_size_t()
    args = _Args(struct_size=ctypes.sizeof(_Args), batch=1, total_q=ROWS, max_q_len=ROWS, num_heads=HEADS)
    args.d_latent, args.d_rope, args.page_size, args.num_slots = 512, 64, 1, SLOTS
    args.q_stride_token, args.q_stride_head, args.kv_stride, args.draft_kv_stride = HEADS * WIDTH, WIDTH, WIDTH, WIDTH
    args.num_kv_indices, args.mask_size, args.kv_indices_type, args.visibility_type = 5, 9, 1, 1
    args.sm_scale = 0.1
    for name in ("q", "kv_pool", "draft_kv", "qo_indptr", "kv_indptr", "kv_indices", "out", "lse"):
        setattr(args, name, given[name].ctypes.data)
    args.visibility = given["mask"].ctypes.data
    host.call("verify_attn_paged_workspace_size", ctypes.byref(args), ctypes.byref(size))
    workspace = aligned((size.value,), np.uint8)
    args.workspace, args.workspace_size = workspace.ctypes.data, size.value
    setattr(args, field, value)
    with pytest.raises(KernelError) as raised:
        host.call("verify_attn_flash_paged", ctypes.byref(args), None)
    assert raised.value.argument == field
    assert (given["out"] == POISON).all()
