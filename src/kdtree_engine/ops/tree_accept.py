"""Op tree_accept: the path along which a draft tree agrees with the target.

target[i] = given | argmax_v logits[i, v], of equals the lower v | drawn: the first v with sum_{w <= v} p[w] > u[i]
path      = 0, then, while a child of the last node holds its target, the first such child;  bonus = target[last]

with p = softmax(logits[i] / temperature) and a uniform u. Drawing at every node and walking is lossless, since the
logits of a node depend on its own ancestors. Given targets and argmax are exact: the same result on every device.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from kdtree_engine.contract import Axes
from kdtree_engine.errors import KernelError
from kdtree_engine.ops.layout import layout
from kdtree_engine.tensors import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    adaptor_for,
    integer,
    library_for,
    number,
    put,
    put_outputs,
)

if TYPE_CHECKING:
    from kdtree_engine._native import Library
    from kdtree_engine.tensors import NumpyAdaptor, TorchAdaptor


class Acceptance(NamedTuple):
    """What a round accepts; `rows` are those of the trees' tokens: [batch, max_q_len] or [total_q]."""

    path: Any  # int32 [batch, max_path]: accepted nodes in the request, root first, -1 behind
    path_len: Any  # int32 [batch]
    bonus: Any  # [batch], of tokens' dtype: the target after the last accepted node, -1 for none
    node_targets: Any  # [rows], of tokens' dtype: every node's target
    accept_index: Any  # int32 [batch, max_path]: accepted rows among all, -1 behind
    accept_token_num: Any  # int32 [batch]: accepted drafts, the root not counted
    predicts: Any  # int32 [rows]: the target of each accepted row, 0 elsewhere
    status: Any  # int32 [batch], kdtree_request_status of kdtree/capi.h; 0 is good


_TARGETS = ("tokens", "argmax", "sample")  # in the order of kdtree_target
_POINTERS = (
    "tokens",
    "parents",
    "retrive_next_token",
    "retrive_next_sibling",
    "qo_indptr",
    "num_nodes",
    "target_tokens",
    "logits",
    "uniforms",
    *Acceptance._fields,
    "workspace",
)


class _Args(ctypes.Structure):
    """kdtree_tree_accept_args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("workspace_size", ctypes.c_size_t),
        *(
            (name, ctypes.c_int64)
            for name in ("batch", "total_q", "max_q_len", "max_path", "vocab_size", "logits_stride")
        ),
        ("temperature", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("target", "logits_type", "token_type", "index_type", "qo_indptr_type")),
    )


def _logits(args: _Args, adaptor: NumpyAdaptor | TorchAdaptor, logits: Any) -> None:
    """Puts logits [rows, vocab_size], of any stride between rows, into the arguments."""
    adaptor.check("logits", logits, FLOAT_DTYPES, dense=False)
    shape, strides = tuple(logits.shape), adaptor.strides(logits)
    rows = math.prod(shape[:-1])
    if len(shape) not in (2, 3) or rows != args.total_q:
        raise KernelError("logits", f"got shape {list(shape)}, expected [{args.total_q} rows, vocab_size]; reshape it")
    flat = len(shape) == 2 or strides[0] == shape[1] * strides[1]
    if not flat or (strides[-1] != 1 and shape[-1] > 1):
        raise KernelError("logits", f"got strides {strides}, expected rows without gaps, equally far apart; copy it")
    args.logits = adaptor.pointer(logits)
    args.vocab_size = shape[-1]
    args.logits_stride = strides[-2] if rows > 1 else shape[-1]
    args.logits_type = FLOAT_DTYPES.index(adaptor.dtype(logits))


def tree_accept(
    tokens: Any,
    *,
    parents: Any = None,
    retrive_next_token: Any = None,
    retrive_next_sibling: Any = None,
    qo_indptr: Any = None,
    num_nodes: Any = None,
    target_tokens: Any = None,
    logits: Any = None,
    uniforms: Any = None,
    temperature: float = 1.0,
    max_q_len: int | None = None,
    max_path: int | None = None,
    out: Acceptance | None = None,
    workspace: Any = None,
    library: Library | None = None,
) -> Acceptance:
    """Walks each request's tree along its target tokens.

    NumPy arrays (bfloat16 as uint16) and torch CPU tensors run on the host library; torch CUDA tensors on the GPU
    library, in order on torch's current stream, without reading the device or synchronising. What is wrong with one
    request sets its status; it then accepts nothing, and the others are left alone.

    Args:
        tokens: the trees' tokens, int32 or int64: [batch, max_q_len], or with qo_indptr [total_q].
        parents: int32, as tokens: parent in the request, negative for the root, before its children.
        retrive_next_token: instead of parents, with retrive_next_sibling: first child, int32 or int64, -1 for none.
        retrive_next_sibling: next sibling, of the same dtype, -1 for none.
        qo_indptr: first row of each request, int32 or int64 [batch + 1].
        num_nodes: without qo_indptr, nodes of each request, int32 [batch]; None: all.
        target_tokens: every node's target, as tokens.
        logits: instead of target_tokens, bfloat16 or float32 [rows, vocab_size], any stride between rows, 16-byte
            aligned.
        uniforms: float32 in [0, 1), as tokens: draw by them instead of taking the most probable.
        temperature: of the softmax that is drawn from; finite and > 0.
        max_q_len: with qo_indptr, the most nodes of a request, to 1025; None: as many as there are rows.
        max_path: the longest path there is room for; one that is longer is a bad status. None: max_q_len.
        out: tensors to write to; node_targets, accept_index, accept_token_num and predicts may be None. None allocates.
        workspace: uint8 of at least `tree_accept_workspace_size` bytes; None allocates.
        library: a loaded library; None takes the one for tokens' kind.

    Returns:
        What is accepted; `out` when it was given.

    Raises:
        KernelError: an argument of the wrong kind, dtype, shape, stride, device or range, named by `argument`; or the
            library is missing, or the device refused the launch.
    """
    adaptor = adaptor_for("tokens", tokens, host=True)
    library = library_for(adaptor, tokens, library)
    args = _Args(struct_size=ctypes.sizeof(_Args))
    axes = Axes()
    rows = "batch max_q_len" if qo_indptr is None else "total_q"
    put(args, adaptor, axes, "tokens", tokens, INDEX_DTYPES, rows, required=True)
    token = adaptor.dtype(tokens)
    args.token_type = INDEX_DTYPES.index(token)
    layout(args, adaptor, axes, qo_indptr, num_nodes, max_q_len)
    put(args, adaptor, axes, "parents", parents, ("int32",), rows)
    put(args, adaptor, axes, "retrive_next_token", retrive_next_token, INDEX_DTYPES, rows)
    if retrive_next_token is not None:
        index = adaptor.dtype(retrive_next_token)
        args.index_type = INDEX_DTYPES.index(index)
        put(args, adaptor, axes, "retrive_next_sibling", retrive_next_sibling, (index,), rows)

    put(args, adaptor, axes, "target_tokens", target_tokens, (token,), rows)
    if logits is not None:
        args.target = _TARGETS.index("argmax" if uniforms is None else "sample")
        _logits(args, adaptor, logits)
    elif target_tokens is None:
        raise KernelError("target_tokens", "got None, expected target_tokens or logits; pass one of them")
    elif uniforms is not None:
        raise KernelError("uniforms", "got them without logits, expected None; pass logits or leave them out")
    put(args, adaptor, axes, "uniforms", uniforms, ("float32",), rows)
    args.temperature = number("temperature", temperature, "1 leaves the logits as they are")
    args.max_path = args.max_q_len if max_path is None else integer("max_path", max_path, "pass the longest path")

    outputs: dict[str, tuple[tuple[str, ...], str]] = {
        "path": (("int32",), "batch max_path"),
        "path_len": (("int32",), "batch"),
        "bonus": ((token,), "batch"),
        "node_targets": ((token,), rows),
        "accept_index": (("int32",), "batch max_path"),
        "accept_token_num": (("int32",), "batch"),
        "predicts": (("int32",), rows),
        "status": (("int32",), "batch"),
    }
    axes.check("max_path", (args.max_path,), "max_path")
    with adaptor.active():
        out = put_outputs(args, adaptor, axes, Acceptance, out, outputs, ("path", "path_len", "bonus", "status"))
        if workspace is None:
            workspace = adaptor.empty((_workspace_size(library, args),), "uint8")
        else:
            adaptor.check("workspace", workspace, ("uint8",), writes=True)
        args.workspace = adaptor.pointer(workspace)
        args.workspace_size = math.prod(workspace.shape)
        library.call("tree_accept", ctypes.byref(args), ctypes.c_void_p(adaptor.stream))
    return out


def _workspace_size(library: Library, args: _Args) -> int:
    size = ctypes.c_size_t()
    library.call("tree_accept_workspace_size", ctypes.byref(args), ctypes.byref(size))
    return size.value


def tree_accept_workspace_size(*, total_q: int, target: str = "argmax", vocab_size: int = 0, library: Library) -> int:
    """Bytes of workspace that a call needs on the library's current device; target: tokens, argmax or sample.

    Raises:
        KernelError: an argument out of range, named by `argument`.
    """
    if target not in _TARGETS:
        raise KernelError("target", f"got {target!r}, expected one of {', '.join(_TARGETS)}")
    args = _Args(struct_size=ctypes.sizeof(_Args), total_q=total_q, vocab_size=vocab_size)
    args.target = _TARGETS.index(target)
    return _workspace_size(library, args)
