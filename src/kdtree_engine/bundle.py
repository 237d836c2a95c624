"""Bundles: one HDF5 file with the inputs, the expected outputs and the provenance of one verify step.

fixtures/README.md is the normative description of the file; the dataclasses below mirror it group by group, and the
metadata of their fields (axes, logical dtype) is what the reader checks and the writer stores. Nothing here computes an
expected output: that is the oracle's work.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import re
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import h5py
import numpy as np

from kdtree_engine.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"

FORMAT = "kdtree-bundle"
FORMAT_VERSION = 1
ORIGINS = ("captured", "synthetic")
MODELS = ("tiny_model", "seeded", "none")

# The text line before the HDF5 data. 512 is the smallest offset at which HDF5 looks for data behind a foreign header.
HEADER_BYTES = 512
# Ceilings on what a file may make the reader allocate; ten times the largest bundle that the repository could hold.
MAX_FILE_BYTES = 64 << 20
MAX_ARRAY_BYTES = 256 << 20

MAX_JSON_BYTES = 16 << 10

MAX_NODES = 256
MAX_KEYS = 262_144
MAX_HEADS = 128

_STORED: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint8": np.dtype("u1"),
}
_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,63}")
# Strings are of fixed length: HDF5 keeps those of variable length in a heap without checksums, and reading a heap that
# was forged may never end.
_ATTRIBUTE_KINDS = {str: "S", int: "i", float: "f"}
_GZIP, _SHUFFLE = h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE


class Spec(NamedTuple):
    """What a dataset must be."""

    axes: str  # names, separated by spaces
    logical_dtype: str

    @property
    def names(self) -> list[str]:
        return self.axes.split()

    @property
    def dtype(self) -> np.dtype[Any]:
        """How the logical dtype is stored."""
        return _STORED[self.logical_dtype]


def _axes(axes: str, logical_dtype: str) -> dict[str, Spec]:
    return {"spec": Spec(axes, logical_dtype)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """Who asks: sizes of every request and where its keys lie in the pool."""

    prefix_len: Array = field(metadata=_axes("requests", "int32"))
    num_nodes: Array = field(metadata=_axes("requests", "int32"))
    qo_indptr: Array = field(metadata=_axes("requests+1", "int32"))
    kv_indptr: Array = field(metadata=_axes("requests+1", "int32"))
    kv_indices: Array = field(metadata=_axes("keys", "int64"))


@dataclass(frozen=True, eq=False, kw_only=True)
class Context:
    """The prefix as tokens, requests one after the other."""

    tokens: Array = field(metadata=_axes("prefix", "int32"))


@dataclass(frozen=True, eq=False, kw_only=True)
class Tree:
    """The draft trees, requests one after the other; indices count from each request's root."""

    tokens: Array = field(metadata=_axes("nodes", "int32"))
    parents: Array = field(metadata=_axes("nodes", "int32"))
    depths: Array = field(metadata=_axes("nodes", "int32"))
    visibility: Array = field(metadata=_axes("pairs", "uint8"))


@dataclass(frozen=True, eq=False, kw_only=True)
class Drafter:
    """What the tree was built from: the drafter's top-K marginals for every depth."""

    log_probs: Array = field(metadata=_axes("requests draft_depth rank", "float32"))
    token_ids: Array = field(metadata=_axes("requests draft_depth rank", "int32"))
    budget: Array = field(metadata=_axes("requests", "int32"))


@dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """One layer's attention: inputs as the kernel gets them, and the oracle's answer to those inputs."""

    q: Array = field(metadata=_axes("nodes heads width", "bfloat16"))
    kv: Array = field(metadata=_axes("keys width", "bfloat16"))
    out: Array | None = field(default=None, metadata=_axes("nodes heads d_latent", "float32"))
    lse: Array | None = field(default=None, metadata=_axes("nodes heads", "float32"))


@dataclass(frozen=True, eq=False, kw_only=True)
class Witness:
    """What the model itself computed, with its own attention: independent of the oracle."""

    logits: Array = field(metadata=_axes("nodes vocab", "float32"))
    attn: tuple[Array, ...] = field(default=(), metadata=_axes("nodes values", "float32"))


@dataclass(frozen=True, eq=False, kw_only=True)
class Expected:
    """The oracle's logits and the round that follows from them."""

    argmax: Array = field(metadata=_axes("nodes", "int32"))
    second: Array = field(metadata=_axes("nodes", "int32"))
    margin: Array = field(metadata=_axes("nodes", "float32"))
    logits: Array = field(metadata=_axes("nodes vocab", "float32"))
    accepted_path: Array = field(metadata=_axes("accepted", "int32"))
    accepted_len: Array = field(metadata=_axes("requests", "int32"))
    bonus: Array = field(metadata=_axes("requests", "int32"))
    committed_slots: Array = field(metadata=_axes("accepted", "int64"))
    logit_budget: float = 0.0
    logit_budget_bfloat16: float = 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Bundle:
    """One bundle. Arrays are laid out as in the file: ragged axes are requests one after the other.

    T = all nodes, K = all keys (prefix and nodes of every request), H = num_heads, d = d_latent + d_rope.
    bfloat16 arrays are held as uint16 bits.
    """

    name: str
    page_size: int
    num_slots: int
    num_heads: int
    d_latent: int
    d_rope: int
    sm_scale: float
    origin: str
    model: str
    provenance: Mapping[str, Any]
    request: Request
    context: Context
    tree: Tree
    layers: tuple[Layer, ...]
    model_config: Mapping[str, Any] | None = None
    model_seed: int | None = None
    drafter: Drafter | None = None
    witness: Witness | None = None
    expected: Expected | None = None

    @property
    def batch(self) -> int:
        return int(self.request.prefix_len.size)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def width(self) -> int:
        return self.d_latent + self.d_rope

    @property
    def complete(self) -> bool:
        """Whether the oracle's answers are in it; a fresh capture has none."""
        return self.expected is not None

    def nodes(self, request: int) -> slice:
        """Where the request's nodes lie on a `nodes` axis."""
        return slice(int(self.request.qo_indptr[request]), int(self.request.qo_indptr[request + 1]))

    def keys(self, request: int) -> slice:
        """Where the request's keys lie on a `keys` axis: its prefix in order, then its nodes."""
        return slice(int(self.request.kv_indptr[request]), int(self.request.kv_indptr[request + 1]))

    def prefix(self, request: int) -> slice:
        """Where the request's prefix lies on a `prefix` axis."""
        start = int(self.request.prefix_len[:request].sum())
        return slice(start, start + int(self.request.prefix_len[request]))

    def node_slots(self, request: int) -> Array:
        """Pool slots of the request's nodes, int64 [n]."""
        return self.request.kv_indices[self.keys(request)][int(self.request.prefix_len[request]) :]

    def accepted(self, request: int) -> slice:
        """Where the request's path lies on an `accepted` axis."""
        if self.expected is None:
            _refuse(
                "expected",
                f"{self.name} has no expected outputs; add it with the bundle command first",
            )
        start = int(self.expected.accepted_len[:request].sum())
        return slice(start, start + int(self.expected.accepted_len[request]))

    def visibility(self, request: int) -> Array:
        """Which nodes each node sees, uint8 [n, n]."""
        sizes = self.request.num_nodes.astype(np.int64) ** 2
        start, n = int(sizes[:request].sum()), int(self.request.num_nodes[request])
        return self.tree.visibility[start : start + n * n].reshape(n, n)

    def mask(self) -> Array:
        """Which keys each node sees, uint8 [B, max n, max P+n]; rows and columns of the padding are zero."""
        kv_len = self.request.prefix_len + self.request.num_nodes
        mask = np.zeros((self.batch, int(self.request.num_nodes.max()), int(kv_len.max())), np.uint8)
        for b in range(self.batch):
            n, prefix = int(self.request.num_nodes[b]), int(self.request.prefix_len[b])
            mask[b, :n, :prefix] = 1
            mask[b, :n, prefix : prefix + n] = self.visibility(b)
        return mask

    def pad_nodes(self, rows: Array, fill: float = 0.0) -> Array:
        """[T, ...] as [B, max n, ...]."""
        n = int(self.request.num_nodes.max())
        padded = np.full((self.batch, n, *rows.shape[1:]), fill, rows.dtype)
        for b in range(self.batch):
            padded[b, : self.request.num_nodes[b]] = rows[self.nodes(b)]
        return padded

    def unpad_nodes(self, padded: Array) -> Array:
        """[B, max n, ...] as [T, ...]."""
        return np.concatenate([padded[b, : self.request.num_nodes[b]] for b in range(self.batch)])

    def pad_keys(self, rows: Array, fill: float) -> Array:
        """[K, ...] as [B, max P+n, ...]."""
        kv_len = self.request.prefix_len + self.request.num_nodes
        padded = np.full((self.batch, int(kv_len.max()), *rows.shape[1:]), fill, rows.dtype)
        for b in range(self.batch):
            padded[b, : kv_len[b]] = rows[self.keys(b)]
        return padded

    def dense(self, layer: int, poison: float = math.nan) -> dict[str, Array]:
        """The layer's inputs for the dense op: q [B, n, H, d] and kv [B, P+n, d] float32, mask uint8 [B, n, P+n],
        kv_len int32 [B], padded to the largest request.

        Padded key rows hold `poison`: they must never be read. Padded queries are zero and see nothing.
        """
        inputs = self._layer(layer)
        return {
            "q": self.pad_nodes(from_bfloat16(inputs.q)),
            "kv": self.pad_keys(from_bfloat16(inputs.kv), poison),
            "mask": self.mask(),
            "kv_len": (self.request.prefix_len + self.request.num_nodes).astype(np.int32),
        }

    def pool(self, layer: int, poison: float = math.nan) -> Array:
        """The layer's paged pool, bfloat16 bits [num_slots, d]; slots that no request uses hold `poison`."""
        bits = to_bfloat16(np.full(1, poison, np.float32))[0]
        pool = np.full((self.num_slots, self.width), bits, np.uint16)
        pool[self.request.kv_indices] = self._layer(layer).kv
        return pool

    def _layer(self, layer: int) -> Layer:
        if not 0 <= layer < self.num_layers:
            _refuse("layer", f"{layer} is not in {self.name}; expected 0..{self.num_layers - 1}")
        return self.layers[layer]


def to_bfloat16(values: Array) -> Array:
    """float32 to bfloat16 bits (uint16), round to nearest even; every NaN becomes 0x7fc0."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    """bfloat16 bits (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def find(root: str | os.PathLike[str]) -> list[Path]:
    """Every bundle under a folder, sorted by path."""
    return sorted(Path(root).rglob("*.h5"))


def digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of the whole file, in hex."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def read(path: str | os.PathLike[str]) -> Bundle:
    """Read and validate a bundle; BundleError says what is wrong with the file and where."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        _refuse("path", f"cannot read {path}: {error.strerror}; check the path")
    try:
        body = _strip_header(data)
        try:
            with h5py.File(io.BytesIO(body), "r") as file:
                bundle = _from_hdf5(file)
        except BundleError:
            raise
        except Exception as error:  # HDF5 reports a damaged structure by many exception types
            reason = " ".join(str(error).split())[:200]
            _refuse("file", f"its HDF5 data cannot be read ({reason}); get the file again")
        validate(bundle)
    except BundleError as error:
        problem = str(error).removeprefix(f"{error.argument}: ")
        raise BundleError(error.argument, f"{path.name}: {problem}") from None
    return bundle


def write(path: str | os.PathLike[str], bundle: Bundle) -> None:
    """Validate a bundle and write it; the same bundle always gives the same bytes with the same HDF5 library.

    The file appears whole or not at all: a full or read-only disk raises BundleError and leaves an old file as it was.
    """
    validate(bundle)
    body = _to_hdf5(bundle)
    if HEADER_BYTES + len(body) > MAX_FILE_BYTES:
        _refuse(
            "bundle",
            f"{bundle.name} takes {len(body)} bytes; a file may hold {MAX_FILE_BYTES}; store fewer layers or keys",
        )
    replace_file(path, _header(body) + body)


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Put `data` at `path` whole: written beside it, flushed to the disk, then renamed over it."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _refuse(
            "path",
            f"cannot write {path}: {error.strerror}; nothing was changed; free or choose another folder",
        )


def validate(bundle: Bundle) -> None:
    """Check a bundle in memory against everything that fixtures/README.md demands; BundleError names what fails."""
    _check_scalars(bundle)
    sizes = _check_requests(bundle)
    _check_arrays(bundle, sizes)
    for b in range(bundle.batch):
        _check_tree(bundle, b)
    _check_slots(bundle)
    _check_values(bundle)
    if bundle.expected is not None:
        _check_expected(bundle, bundle.expected)


def _refuse(argument: str, message: str) -> NoReturn:
    raise BundleError(argument, message)


def _check_scalars(bundle: Bundle) -> None:
    if not isinstance(bundle.name, str) or not _NAME.fullmatch(bundle.name):
        _refuse("name", f"{bundle.name!r} is not a bundle name; use 1..64 of a-z, 0-9 and _")
    ranges = {
        "page_size": (1, 1 << 16),
        "num_slots": (1, 1 << 31),
        "num_heads": (1, MAX_HEADS),
        "d_latent": (1, 4096),
        "d_rope": (0, 4096),
    }
    for name, (low, high) in ranges.items():
        value = getattr(bundle, name)
        if not isinstance(value, int) or not low <= value <= high:
            _refuse(name, f"got {value!r}; expected an integer in {low}..{high}")
    if bundle.num_slots % bundle.page_size:
        _refuse(
            "num_slots",
            f"got {bundle.num_slots}; expected a multiple of page_size = {bundle.page_size}",
        )
    if not isinstance(bundle.sm_scale, float) or not 0 < bundle.sm_scale < math.inf:
        _refuse("sm_scale", f"got {bundle.sm_scale!r}; expected a positive finite number")
    if bundle.origin not in ORIGINS:
        _refuse("origin", f"got {bundle.origin!r}; expected one of {', '.join(ORIGINS)}")
    if bundle.model not in MODELS:
        _refuse("model", f"got {bundle.model!r}; expected one of {', '.join(MODELS)}")
    seeded = bundle.model == "seeded"
    if seeded != (bundle.model_config is not None) or seeded != (bundle.model_seed is not None):
        _refuse(
            "model_config",
            f"model {bundle.model!r}: model_config and model_seed go with model 'seeded' and only with it",
        )
    if bundle.model_seed is not None and (
        not isinstance(bundle.model_seed, int) or not 0 <= bundle.model_seed < 1 << 63
    ):
        _refuse("model_seed", f"got {bundle.model_seed!r}; expected an integer in 0..2^63-1")
    for name, mapping in (("provenance", bundle.provenance), ("model_config", bundle.model_config)):
        try:
            size = len(_to_json(mapping))
        except (TypeError, ValueError) as error:
            _refuse(
                name,
                f"cannot be stored as JSON ({error}); keep to strings, finite numbers, lists and objects",
            )
        if size > MAX_JSON_BYTES:
            _refuse(name, f"takes {size} bytes as JSON; expected at most {MAX_JSON_BYTES}")


def _check_requests(bundle: Bundle) -> dict[str, int]:
    """Sizes of the axes that the request group fixes."""
    request = bundle.request
    batch = np.size(request.prefix_len)
    if batch < 1:
        _refuse("request/prefix_len", "it is empty; expected at least one request")
    sizes = {
        "requests": batch,
        "requests+1": batch + 1,
        "heads": bundle.num_heads,
        "width": bundle.width,
        "d_latent": bundle.d_latent,
    }
    for name in ("prefix_len", "num_nodes", "qo_indptr", "kv_indptr"):
        _check_array(f"request/{name}", getattr(request, name), _spec(Request, name), sizes)
    prefix_len, num_nodes = request.prefix_len.astype(np.int64), request.num_nodes.astype(np.int64)
    for b in range(batch):
        if prefix_len[b] < 0:
            _refuse("request/prefix_len", f"request {b} has {prefix_len[b]}; expected 0 or more")
        if not 1 <= num_nodes[b] <= MAX_NODES:
            _refuse(
                "request/num_nodes",
                f"request {b} has {num_nodes[b]}; expected 1..{MAX_NODES}, the root counted",
            )
        if prefix_len[b] + num_nodes[b] > MAX_KEYS:
            _refuse(
                "request/prefix_len",
                f"request {b} has {prefix_len[b] + num_nodes[b]} keys; expected at most {MAX_KEYS}",
            )
    counts = {"qo_indptr": num_nodes, "kv_indptr": prefix_len + num_nodes}
    for name, count in counts.items():
        expected = np.concatenate([[0], np.cumsum(count)])
        if not np.array_equal(getattr(request, name), expected):
            _refuse(
                f"request/{name}",
                f"got {_short(getattr(request, name))}; expected {_short(expected)} from prefix_len and num_nodes",
            )
    return sizes | {
        "nodes": int(num_nodes.sum()),
        "keys": int((prefix_len + num_nodes).sum()),
        "prefix": int(prefix_len.sum()),
        "pairs": int((num_nodes**2).sum()),
    }


def _check_arrays(bundle: Bundle, sizes: dict[str, int]) -> None:
    if bundle.expected is not None:
        name = "expected/accepted_len"
        _check_array(name, bundle.expected.accepted_len, _spec(Expected, "accepted_len"), sizes)
        lengths = bundle.expected.accepted_len
        for b in range(bundle.batch):
            if not 1 <= lengths[b] <= bundle.request.num_nodes[b]:
                _refuse(name, f"request {b} has {lengths[b]}; expected 1..{bundle.request.num_nodes[b]}")
        sizes = sizes | {"accepted": int(lengths.sum())}
    if not bundle.layers:
        _refuse("layers", "there is none; expected layers 0, 1, ...")
    for index, layer in enumerate(bundle.layers):
        if (layer.out is None) != (layer.lse is None) or (layer.out is None) == bundle.complete:
            _refuse(
                f"layers/{index}/out",
                "out, lse and expected go together; expected all of them or none",
            )
    if bundle.witness is not None and len(bundle.witness.attn) not in (0, bundle.num_layers):
        _refuse(
            "witness/attn",
            f"it has {len(bundle.witness.attn)} layers; expected {bundle.num_layers} or none",
        )
    for name, array, spec in datasets(bundle):
        _check_array(name, array, spec, sizes)
    if bundle.witness is not None and bundle.witness.attn and sizes["values"] % bundle.num_heads:
        _refuse(
            "witness/attn/0",
            f"rows of {sizes['values']}; expected a multiple of num_heads = {bundle.num_heads}",
        )


def _check_array(name: str, array: Any, spec: Spec, sizes: dict[str, int]) -> None:
    """Shape and dtype of one dataset; an axis met for the first time fixes its size in `sizes`."""
    expected = f"{spec.dtype} [{', '.join(spec.names)}]"
    if not isinstance(array, np.ndarray):
        _refuse(name, f"got {type(array).__name__}; expected an array of {expected}")
    if array.dtype != spec.dtype:
        _refuse(name, f"dtype is {array.dtype}; expected {expected}")
    if array.ndim != len(spec.names):
        _refuse(name, f"shape is {list(array.shape)}; expected {expected}")
    wanted = [sizes.setdefault(axis, size) for axis, size in zip(spec.names, array.shape, strict=True)]
    if list(array.shape) != wanted:
        _refuse(name, f"shape is {list(array.shape)}; expected {wanted} = [{', '.join(spec.names)}]")


def _check_tree(bundle: Bundle, request: int) -> None:
    rows = bundle.nodes(request)
    tokens, parents, depths = (getattr(bundle.tree, name)[rows].tolist() for name in ("tokens", "parents", "depths"))
    n = len(parents)
    if parents[0] != -1 or depths[0] != 0:
        _refuse(
            "tree/parents",
            f"request {request}: node 0 has parent {parents[0]}, depth {depths[0]}; the root has parent -1, depth 0",
        )
    for i in range(1, n):
        if not 0 <= parents[i] < n:
            _refuse(
                "tree/parents",
                f"request {request}: node {i} has parent {parents[i]}; expected 0..{i - 1}",
            )
        if parents[i] >= i:
            kind = "which is in a cycle" if _in_cycle(parents, i) else "which comes after it"
            _refuse(
                "tree/parents",
                f"request {request}: node {i} has parent {parents[i]}, {kind}; expected 0..{i - 1}",
            )
        if depths[i] != depths[parents[i]] + 1:
            _refuse(
                "tree/depths",
                f"request {request}: node {i} has depth {depths[i]}; expected {depths[parents[i]] + 1}",
            )
    children = set()
    for i in range(1, n):
        if (parents[i], tokens[i]) in children:
            _refuse(
                "tree/tokens",
                f"request {request}: node {i} repeats token {tokens[i]} of a sibling; siblings must differ",
            )
        children.add((parents[i], tokens[i]))
    visible = np.eye(n, dtype=np.uint8)
    for i in range(1, n):
        visible[i] |= visible[parents[i]]
    wrong = np.argwhere(bundle.visibility(request) != visible)
    if wrong.size:
        i, j = wrong[0].tolist()
        _refuse(
            "tree/visibility",
            f"request {request}: node {i} sees node {j}: {bundle.visibility(request)[i, j]}; "
            f"expected {visible[i, j]}, since it sees its ancestors and itself",
        )


def _in_cycle(parents: list[int], node: int) -> bool:
    seen = set()
    while 0 <= node < len(parents) and node not in seen:
        seen.add(node)
        node = parents[node]
    return node in seen


def _check_slots(bundle: Bundle) -> None:
    slots = bundle.request.kv_indices
    outside = np.flatnonzero((slots < 0) | (slots >= bundle.num_slots))
    if outside.size:
        _refuse(
            "request/kv_indices",
            f"key {outside[0]} has slot {slots[outside[0]]}; expected 0..{bundle.num_slots - 1}",
        )
    order = np.argsort(slots, kind="stable")
    repeated = np.flatnonzero(np.diff(slots[order]) == 0)
    if repeated.size:
        first, second = order[repeated[0]], order[repeated[0] + 1]
        _refuse(
            "request/kv_indices",
            f"keys {first} and {second} share slot {slots[first]}; expected a slot for each key",
        )


def _check_values(bundle: Bundle) -> None:
    for name, array, spec in datasets(bundle):
        logical = spec.logical_dtype
        if logical == "bfloat16":
            finite = (array & np.uint16(0x7F80)) != 0x7F80
        elif logical == "float32":
            finite = np.isfinite(array)
        else:
            continue
        if name == "drafter/log_probs":
            finite |= np.isneginf(array)
        if not finite.all():
            where = np.argwhere(~finite)[0].tolist()
            _refuse(name, f"the value at {where} is not finite; expected finite numbers")
    for name in ("context/tokens", "tree/tokens", "drafter/token_ids", "drafter/budget"):
        group, attribute = name.split("/")
        owner = getattr(bundle, group)
        if owner is not None and (getattr(owner, attribute) < 0).any():
            where = np.argwhere(getattr(owner, attribute) < 0)[0].tolist()
            _refuse(name, f"the value at {where} is negative; expected 0 or more")
    if bundle.drafter is not None:
        rising = np.argwhere(bundle.drafter.log_probs[..., 1:] > bundle.drafter.log_probs[..., :-1])
        if rising.size:
            _refuse(
                "drafter/log_probs",
                f"it rises after {rising[0].tolist()}; expected descending values along rank",
            )


def _check_expected(bundle: Bundle, expected: Expected) -> None:
    vocab = expected.logits.shape[1]
    if vocab < 2:
        _refuse("expected/logits", f"the vocabulary has {vocab} tokens; expected 2 or more")
    for name, tokens in (
        ("argmax", expected.argmax),
        ("second", expected.second),
        ("bonus", expected.bonus),
    ):
        if (tokens < 0).any() or (tokens >= vocab).any():
            _refuse(f"expected/{name}", f"got {_short(tokens)}; expected 0..{vocab - 1}")
    if (expected.margin < 0).any():
        _refuse(
            "expected/margin",
            "a margin is negative; expected the gap between the best and the second logit",
        )
    for name in ("logit_budget", "logit_budget_bfloat16"):
        value = getattr(expected, name)
        if not isinstance(value, float) or not 0 < value < math.inf:
            _refuse(f"expected/{name}", f"got {value!r}; expected a positive finite number")
    for b in range(bundle.batch):
        path = expected.accepted_path[bundle.accepted(b)].tolist()
        n = int(bundle.request.num_nodes[b])
        parents = bundle.tree.parents[bundle.nodes(b)].tolist()
        if (
            path[0] != 0
            or any(not 0 < i < n for i in path[1:])
            or any(parents[i] != p for p, i in itertools.pairwise(path))
        ):
            _refuse(
                "expected/accepted_path",
                f"request {b} has {path}; expected a path of the tree that starts at the root, 0",
            )
        slots, committed = bundle.node_slots(b)[: len(path)], expected.committed_slots[bundle.accepted(b)]
        if not np.array_equal(committed, slots):
            _refuse(
                "expected/committed_slots",
                f"request {b} has {_short(committed)}; expected its first node slots {_short(slots)}",
            )


def _short(values: Array) -> str:
    text = ", ".join(str(value) for value in np.ravel(values)[:8].tolist())
    return f"[{text}{', ...' if np.size(values) > 8 else ''}]"


def _spec(owner: type[Any], name: str) -> Spec:
    spec: Spec = owner.__dataclass_fields__[name].metadata["spec"]
    return spec


def datasets(bundle: Bundle) -> Iterator[tuple[str, Array, Spec]]:
    """Every dataset of the file: its path, its array, its description."""
    groups: list[tuple[str, Any]] = [
        (name, getattr(bundle, name)) for name in ("request", "context", "tree", "drafter", "witness", "expected")
    ]
    groups += [(f"layers/{index}", layer) for index, layer in enumerate(bundle.layers)]
    for group, owner in groups:
        if owner is None:
            continue
        for name, spec in _specs(type(owner)):
            value = getattr(owner, name)
            if isinstance(value, tuple):
                for index, array in enumerate(value):
                    yield f"{group}/{name}/{index}", array, spec
            elif value is not None:
                yield f"{group}/{name}", value, spec


def _specs(owner: type[Any]) -> Iterator[tuple[str, Spec]]:
    """The datasets of one group."""
    for member in dataclasses.fields(owner):
        if "spec" in member.metadata:
            yield member.name, member.metadata["spec"]


def _to_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _header(body: bytes) -> bytes:
    line = f"{FORMAT} {FORMAT_VERSION} sha256:{hashlib.sha256(body).hexdigest()}\n".encode()
    return line.ljust(HEADER_BYTES, b"\0")


def _strip_header(data: bytes) -> bytes:
    """The HDF5 data behind the header, once its digest is right: HDF5 never sees a damaged file."""
    if len(data) > MAX_FILE_BYTES:
        _refuse("file", f"it is larger than {MAX_FILE_BYTES} bytes; a bundle is not; check the path")
    match = re.match(rb"kdtree-bundle ([0-9]{1,9}) ", data[:HEADER_BYTES])
    if match is None:
        _refuse(
            "file",
            "it does not begin with 'kdtree-bundle'; write bundles with kdtree_engine.bundle.write",
        )
    _check_version(int(match[1]))
    body = data[HEADER_BYTES:]
    if data[:HEADER_BYTES] != _header(body):
        _refuse(
            "file",
            f"its SHA-256 is not the one in its header: truncated ({len(data)} bytes) or damaged; get the file again",
        )
    return body


def _check_version(version: int) -> None:
    if version > FORMAT_VERSION:
        _refuse(
            "format_version",
            f"it is {version}, newer than {FORMAT_VERSION}; update kdtree-engine to read it",
        )
    if version != FORMAT_VERSION:
        _refuse("format_version", f"it is {version}; expected {FORMAT_VERSION}")


def _attributes(bundle: Bundle) -> dict[str, Any]:
    """The root attributes, in the order of the file."""
    values: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "name": bundle.name,
        "op": "verify_attn",
        "origin": bundle.origin,
        "model": bundle.model,
        "page_size": bundle.page_size,
        "num_slots": bundle.num_slots,
        "num_heads": bundle.num_heads,
        "d_latent": bundle.d_latent,
        "d_rope": bundle.d_rope,
        "sm_scale": bundle.sm_scale,
        "provenance": _to_json(bundle.provenance),
    }
    if bundle.model_config is not None:
        values |= {"model_config": _to_json(bundle.model_config), "model_seed": bundle.model_seed}
    return values


def _to_hdf5(bundle: Bundle) -> bytes:
    with h5py.File("bundle", "w", driver="core", backing_store=False, libver=("v110", "v110")) as file:
        for name, value in _attributes(bundle).items():
            _set_attribute(file, name, value)
        for path, array, spec in datasets(bundle):
            # One chunk a dataset: HDF5 allows no chunk of zero elements, and its own choice varies by version.
            packing = (
                {
                    "chunks": array.shape,
                    "compression": "gzip",
                    "compression_opts": 4,
                    "shuffle": True,
                }
                if array.size
                else {}
            )
            dataset = file.create_dataset(path, data=array, track_times=False, **packing)
            _set_attribute(dataset, "axes", spec.axes)
            _set_attribute(dataset, "logical_dtype", spec.logical_dtype)
            _set_attribute(dataset, "sha256", hashlib.sha256(array.tobytes()).hexdigest())
        if bundle.expected is not None:
            for name in ("logit_budget", "logit_budget_bfloat16"):
                _set_attribute(file["expected"], name, getattr(bundle.expected, name))
        file.flush()
        image: bytes = file.id.get_file_image()
        return image


def _set_attribute(owner: Any, name: str, value: str | float) -> None:
    owner.attrs[name] = np.bytes_(value.encode("ascii")) if isinstance(value, str) else value


_Group = TypeVar("_Group")


class _Reader:
    """Fetches exactly the objects of the format from an open file, refusing whatever could cost more than it holds."""

    def __init__(self, file: h5py.File) -> None:
        self.file = file
        self.bytes_left = MAX_ARRAY_BYTES
        self.known: set[str] = set()

    def attribute(self, kind: type[Any], name: str, group: str = "/") -> Any:
        owner = self.file[group]
        label = name if group == "/" else f"{group}/{name}"
        if name not in owner.attrs:
            _refuse(label, "the attribute is missing; get the file again")
        stored = owner.attrs.get_id(name)
        if stored.shape != () or stored.dtype.kind != _ATTRIBUTE_KINDS[kind]:
            _refuse(label, f"got {stored.dtype} of shape {stored.shape}; expected one {kind.__name__}")
        value = owner.attrs[name].item()
        return value.decode("ascii") if kind is str else value

    def json(self, name: str) -> Any:
        text = self.attribute(str, name)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            _refuse(name, "it is not JSON; expected an object")
        if not isinstance(value, dict):
            _refuse(name, f"it is a {type(value).__name__}; expected an object")
        return value

    def children(self, group: str) -> list[str]:
        """Names in a group; nothing but hard links, so that no name leads out of the file."""
        if group not in self.file:
            return []
        owner = self.file[group]
        if not isinstance(owner, h5py.Group):
            _refuse(group, "expected a group")
        for name in owner:
            if not isinstance(owner.get(name, getlink=True), h5py.HardLink):
                _refuse(
                    f"{group}/{name}".lstrip("/"),
                    "it is a link to another place; expected the data itself",
                )
        return list(owner)

    def array(self, path: str, spec: Spec) -> Array:
        self.known.add(path)
        group, _, name = path.rpartition("/")
        if name not in self.children(group):
            _refuse(path, "the dataset is missing; get the file again")
        dataset = self.file[path]
        if not isinstance(dataset, h5py.Dataset):
            _refuse(path, "expected a dataset")
        if dataset.dtype != spec.dtype:
            _refuse(path, f"dtype is {dataset.dtype}; expected {spec.dtype} for {spec.logical_dtype}")
        if dataset.shape is None or dataset.ndim != len(spec.names):
            _refuse(path, f"shape is {dataset.shape}; expected [{', '.join(spec.names)}]")
        plist = dataset.id.get_create_plist()
        filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
        whole = dataset.chunks is None if not filters else dataset.chunks == dataset.shape
        if filters not in ([], [_SHUFFLE, _GZIP]) or not whole or dataset.external or dataset.is_virtual:
            _refuse(
                path,
                "it is stored otherwise; expected plain data, or one chunk with shuffle and gzip",
            )
        self.bytes_left -= math.prod(dataset.shape) * spec.dtype.itemsize
        if self.bytes_left < 0:
            _refuse(
                path,
                f"shape is {list(dataset.shape)}; the arrays of a bundle take at most {MAX_ARRAY_BYTES} bytes",
            )
        for name, expected in (("axes", spec.axes), ("logical_dtype", spec.logical_dtype)):
            stored = self.attribute(str, name, path)
            if stored != expected:
                _refuse(f"{path}/{name}", f"got {stored!r}; expected {expected!r}")
        array: Array = _inflate(path, dataset) if filters else dataset[()]
        if self.attribute(str, "sha256", path) != hashlib.sha256(array.tobytes()).hexdigest():
            _refuse(path, "its SHA-256 differs from the stored one; get the file again")
        return array

    def group(self, owner: type[_Group], path: str, **extra: Any) -> _Group:
        present, values = self.children(path), dict(extra)
        for name, spec in _specs(owner):
            optional = owner.__dataclass_fields__[name].default is None  # type: ignore[attr-defined]
            if name not in values and not (optional and name not in present):
                values[name] = self.array(f"{path}/{name}", spec)
        return owner(**values)

    def numbered(self, path: str) -> list[str]:
        """The children 0, 1, 2, ... of a group as paths."""
        names = self.children(path)
        if sorted(names) != sorted(str(index) for index in range(len(names))):
            _refuse(path, f"it holds {', '.join(sorted(names)[:8])}; expected 0, 1, 2, ...")
        return [f"{path}/{index}" for index in range(len(names))]

    def check_nothing_else(self) -> None:
        groups = {path.rpartition("/")[0] for path in self.known}
        groups |= {group.split("/")[0] for group in groups}
        for group in ["", *sorted(groups)]:
            for name in self.children(group or "/"):
                path = f"{group}/{name}".lstrip("/")
                if path not in self.known and path not in groups:
                    _refuse(path, "it is not part of the format; remove it or raise the format version")


def _inflate(path: str, dataset: h5py.Dataset) -> Array:
    """The dataset's only chunk, unpacked here: HDF5 would unpack as much as a forged chunk makes it."""
    mask, packed = dataset.id.read_direct_chunk((0,) * dataset.ndim)
    itemsize = dataset.dtype.itemsize
    size = dataset.size * itemsize
    data = zlib.decompressobj().decompress(packed, size + 1)
    if mask or len(data) != size:
        _refuse(path, f"its chunk does not unpack to {size} bytes; get the file again")
    shuffled = np.frombuffer(data, np.uint8).reshape(itemsize, dataset.size)
    array: Array = np.ascontiguousarray(shuffled.T).view(dataset.dtype).reshape(dataset.shape)
    return array


def _from_hdf5(file: h5py.File) -> Bundle:
    reader = _Reader(file)
    if reader.attribute(str, "format") != FORMAT:
        _refuse("format", f"got {reader.attribute(str, 'format')!r}; expected {FORMAT!r}")
    _check_version(reader.attribute(int, "format_version"))
    if reader.attribute(str, "op") != "verify_attn":
        _refuse("op", f"got {reader.attribute(str, 'op')!r}; expected 'verify_attn'")
    top = reader.children("/")
    seeded = "model_config" in file.attrs
    attn_spec = _spec(Witness, "attn")
    bundle = Bundle(
        name=reader.attribute(str, "name"),
        origin=reader.attribute(str, "origin"),
        model=reader.attribute(str, "model"),
        page_size=reader.attribute(int, "page_size"),
        num_slots=reader.attribute(int, "num_slots"),
        num_heads=reader.attribute(int, "num_heads"),
        d_latent=reader.attribute(int, "d_latent"),
        d_rope=reader.attribute(int, "d_rope"),
        sm_scale=reader.attribute(float, "sm_scale"),
        provenance=reader.json("provenance"),
        model_config=reader.json("model_config") if seeded else None,
        model_seed=reader.attribute(int, "model_seed") if seeded else None,
        request=reader.group(Request, "request"),
        context=reader.group(Context, "context"),
        tree=reader.group(Tree, "tree"),
        drafter=reader.group(Drafter, "drafter") if "drafter" in top else None,
        layers=tuple(reader.group(Layer, path) for path in reader.numbered("layers")),
        witness=reader.group(
            Witness,
            "witness",
            attn=tuple(reader.array(path, attn_spec) for path in reader.numbered("witness/attn")),
        )
        if "witness" in top
        else None,
        expected=reader.group(
            Expected,
            "expected",
            logit_budget=reader.attribute(float, "logit_budget", "expected"),
            logit_budget_bfloat16=reader.attribute(float, "logit_budget_bfloat16", "expected"),
        )
        if "expected" in top
        else None,
    )
    reader.check_nothing_else()
    return bundle
