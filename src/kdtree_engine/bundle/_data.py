"""A bundle in memory: dataclasses that mirror the file group by group, and the views that kernels take."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from kdtree_engine.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"

_STORED: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint8": np.dtype("u1"),
}


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
            refuse("expected", f"{self.name} has no expected outputs; add it with the bundle command first")
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
            refuse("layer", f"{layer} is not in {self.name}; expected 0..{self.num_layers - 1}")
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


def spec_of(owner: type[Any], name: str) -> Spec:
    """The description of one dataset of a group."""
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
        for name, spec in specs_of(type(owner)):
            value = getattr(owner, name)
            if isinstance(value, tuple):
                for index, array in enumerate(value):
                    yield f"{group}/{name}/{index}", array, spec
            elif value is not None:
                yield f"{group}/{name}", value, spec


def specs_of(owner: type[Any]) -> Iterator[tuple[str, Spec]]:
    """The datasets of one group."""
    for member in dataclasses.fields(owner):
        if "spec" in member.metadata:
            yield member.name, member.metadata["spec"]


def to_json(value: Any) -> str:
    """How an attribute that is an object is stored."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def refuse(argument: str, message: str) -> NoReturn:
    """Raise the BundleError of this argument."""
    raise BundleError(argument, message)
