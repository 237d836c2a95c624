"""Cases of tree_build, tree_accept and kv_compact: seeded inputs, and what the oracle makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kdtree_engine import kv_compact, tree_accept, tree_build
from kdtree_engine.bundle import from_bfloat16, to_bfloat16
from oracle.kv_compact import kv_compact as kv_compact_oracle
from oracle.tree_accept import tree_accept_batch
from oracle.tree_build import links, tree_build_batch

if TYPE_CHECKING:
    import numpy.typing as npt

    from phases.places import Place

    Array = npt.NDArray[Any]


@dataclass(frozen=True)
class BuildCase:
    """A batch of drafters' marginals.

    kind: "random"; "bfloat16": rounded to few values, so that scores tie; "permutations": identical peaked rows, whose
    prefixes tie but for rounding; "certain": a first candidate of log-probability 0; "holes": -inf at the end of rows;
    "equal": all candidates alike; "bad": in turn a good request, NaN, +inf, a rising row, a repeated token, and sizes
    out of range.
    """

    batch: int
    depth: int
    width: int
    max_nodes: int
    kind: str = "random"
    ragged: bool = False  # budgets, depths and widths differ
    token_dtype: str = "int32"
    index_dtype: str = "int32"
    seed: int = 0

    def __str__(self) -> str:
        wide = "".join(f"-{name}64" for name in ("token", "index") if getattr(self, f"{name}_dtype") == "int64")
        ragged = "-ragged" if self.ragged else ""
        return f"{self.batch}x{self.depth}x{self.width}-{self.max_nodes}-{self.kind}{ragged}{wide}"

    def inputs(self) -> dict[str, Any]:
        """Arguments of the op and of its oracle."""
        rng = np.random.default_rng([self.batch, self.depth, self.width, self.max_nodes, len(self.kind), self.seed])
        shape = (self.batch, self.depth, self.width)
        logits = rng.standard_normal(shape) * 2
        if self.kind == "permutations":
            logits = np.repeat(4 * logits[:, :1], self.depth, axis=1)
        exact = -np.sort(np.log(np.exp(logits).sum(axis=-1, keepdims=True)) - logits, axis=-1)
        log_probs: Array = exact.astype(np.float32)
        if self.kind == "bfloat16":
            log_probs = np.round(log_probs * 2) / 2
        elif self.kind == "certain":
            log_probs[:, ::2, 0] = 0.0
        elif self.kind == "equal":
            log_probs[:] = -np.float32(np.log(self.width))
        elif self.kind == "holes":
            log_probs[np.arange(self.width) >= rng.integers(0, self.width + 1, (*shape[:2], 1))] = -np.inf
        vocabulary = np.broadcast_to(np.arange(200), (*shape[:2], 200))
        token_ids = rng.permuted(vocabulary, axis=-1)
        arguments: dict[str, Any] = {
            "log_probs": log_probs,
            "token_ids": np.array(token_ids[..., : self.width], self.token_dtype, order="C"),
            "root_tokens": rng.integers(0, 200, self.batch).astype(self.token_dtype),
            "seq_lens": rng.integers(0, 100_000, self.batch).astype(self.index_dtype),
        }
        if self.token_dtype == "int64":  # beyond what 32 bits hold
            arguments["token_ids"] += 2**33
            arguments["root_tokens"] += 2**40
            arguments["seq_lens"] += 2**35 if self.index_dtype == "int64" else 0
        if self.ragged or self.kind == "bad":
            arguments["budgets"] = rng.integers(0, self.max_nodes, self.batch).astype(np.int32)
            arguments["num_depths"] = rng.integers(0, self.depth + 1, self.batch).astype(np.int32)
            arguments["widths"] = rng.integers(1, self.width + 1, self.batch).astype(np.int32)
        if self.kind == "bad":
            self._spoil(arguments, rng)
        return arguments | {"max_nodes": self.max_nodes}

    def _spoil(self, arguments: dict[str, Any], rng: np.random.Generator) -> None:
        sizes = [(name, value) for name in ("budgets", "num_depths", "widths") for value in (-1, 1 << 20)]
        sizes.append(("widths", 0))
        for b in range(self.batch):
            log_probs, token_ids = arguments["log_probs"][b], arguments["token_ids"][b]
            row, column = rng.integers(self.depth), rng.integers(1, self.width)
            kind = b % 6
            if kind in (1, 2):
                log_probs[row, column] = np.nan if kind == 1 else np.inf
            elif kind == 3:
                log_probs[row, column] = log_probs[row, column - 1] + 1
            elif kind == 4:
                token_ids[row, column] = token_ids[row, rng.integers(column)]
            elif kind == 5:
                name, value = sizes[b // 6 % len(sizes)]
                arguments[name][b] = value
            if kind != 5:
                arguments["num_depths"][b], arguments["widths"][b] = self.depth, self.width

    def answer(self) -> dict[str, Array]:
        return tree_build_batch(**self.inputs())

    def run(self, place: Place) -> dict[str, Array]:
        """The kernel's outputs."""
        tensors = {name: place.given(value) for name, value in self.inputs().items()}
        return arrays(place, tree_build(**tensors, index_dtype=self.index_dtype, library=place.library))


@dataclass(frozen=True)
class AcceptCase:
    """A batch of random trees with few distinct tokens, so that paths are long and branches compete.

    target: "tokens"; "argmax" or "sample" of float32 logits, with "-bfloat16" of bfloat16 ones.
    kind: "trees"; "repeats": siblings may share a token, the first counts; "bad": every second request has something
    wrong with it.
    """

    num_nodes: tuple[int, ...]
    target: str = "tokens"
    kind: str = "trees"
    form: str = "parents"  # or "links"
    ragged: bool = False  # rows one request after the other instead of padded
    max_path: int | None = None
    vocab_size: int = 7
    stride: int = 0  # elements between rows of logits beyond vocab_size
    temperature: float = 0.7
    token_dtype: str = "int32"
    index_dtype: str = "int32"

    def __str__(self) -> str:
        nodes = ",".join(map(str, self.num_nodes[:4])) + ("..." if len(self.num_nodes) > 4 else "")
        words = [f"{len(self.num_nodes)}x({nodes})", self.target, self.kind, self.form]
        words += ["ragged"] * self.ragged + [f"path{self.max_path}"] * (self.max_path is not None)
        words += [f"V{self.vocab_size}"] * (self.target != "tokens") + [f"stride{self.stride}"] * bool(self.stride)
        words += [name for name in ("token64", "index64") if getattr(self, f"{name[:5]}_dtype") == "int64"]
        return "-".join(words)

    def inputs(self) -> dict[str, Any]:
        """Arguments of the op; the oracle takes logits as floats."""
        rng = np.random.default_rng([len(self.num_nodes), sum(self.num_nodes), len(self.target), len(self.kind)])
        trees = [self._tree(n, rng) for n in self.num_nodes]
        names = ("tokens", "parents", "retrive_next_token", "retrive_next_sibling")
        if self.ragged:
            arguments: dict[str, Any] = {
                name: np.concatenate([tree[i] for tree in trees]) for i, name in enumerate(names)
            }
            arguments["qo_indptr"] = np.cumsum([0, *self.num_nodes]).astype(self.index_dtype)
            arguments["max_q_len"] = max(*self.num_nodes, 1)
        else:
            width = min(max(self.num_nodes) + 2, 1025)
            # What lies behind a request's nodes must not count: links and parents there are garbage.
            arguments = {name: np.full((len(trees), width), 77) for name in names}
            for b, tree in enumerate(trees):
                for i, name in enumerate(names):
                    arguments[name][b, : len(tree[i])] = tree[i]
            arguments["num_nodes"] = np.array(self.num_nodes, np.int32)
        arguments["tokens"] = arguments["tokens"].astype(self.token_dtype)
        for name in names[2:]:
            arguments[name] = arguments[name].astype(self.index_dtype)
        arguments["parents"] = arguments["parents"].astype(np.int32)
        for name in names[1:2] if self.form == "links" else names[2:]:
            del arguments[name]
        shape = arguments["tokens"].shape
        if self.target == "tokens":
            arguments["target_tokens"] = rng.integers(0, self.vocab_size, shape).astype(self.token_dtype)
        else:
            arguments |= self._logits(shape, rng)
        if self.kind == "bad":
            self._spoil(arguments, rng)
        if self.max_path is not None:
            arguments["max_path"] = self.max_path
        return arguments

    def _tree(self, n: int, rng: np.random.Generator) -> tuple[Array, ...]:
        parents = np.array([-1, *(int(rng.integers(max(0, i - 4), i)) for i in range(1, n))][:n], int)
        tokens = rng.integers(0, self.vocab_size, n)
        if self.kind != "repeats":
            for parent in range(n):
                children = np.flatnonzero(parents == parent)
                tokens[children] = rng.permutation(max(self.vocab_size, len(children)))[: len(children)]
        return tokens, parents, *links(parents.tolist())

    def _logits(self, shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, Any]:
        rows = int(np.prod(shape))
        wide: Array = rng.standard_normal((rows, self.vocab_size + self.stride)).astype(np.float32) * 2
        if self.target.startswith("argmax"):
            wide = np.round(wide * 2) / 2  # many equals
            wide[rows // 3] = -np.inf
            # Zeros of both signs are equal, a negative one first.
            wide[rows // 2] = np.where(np.arange(wide.shape[1]) % 5 == 2, 0.0, -0.0)
        wide[:, rng.integers(0, self.vocab_size, 3)] = -np.inf
        if self.vocab_size < 10:
            wide[:, 0] = 0.0  # some token is left
        if self.target.startswith("sample") and rows > 1:
            wide[1, 1:-1] = -np.inf
            wide[1, [0, self.vocab_size - 1]] = 0.0
            # e^-88 is below the normal range.
            wide[2:3, 1:-1], wide[2:3, 0], wide[2:3, self.vocab_size - 1] = -np.inf, -88 * self.temperature, 0.0
        aligned = np.zeros(wide.size * wide.itemsize + 64, np.uint8)
        start = -aligned.ctypes.data % 64
        stored = to_bfloat16(wide) if self.target.endswith("bfloat16") else wide
        buffer = aligned[start : start + stored.nbytes].view(stored.dtype).reshape(stored.shape)
        buffer[:] = stored
        arguments: dict[str, Any] = {"logits": buffer[:, : self.vocab_size]}
        if self.target.startswith("sample"):
            uniforms = rng.random(shape, np.float32)
            uniforms.reshape(-1)[::5] = 0.0
            if rows > 1:
                # Of two equal tokens exactly the first's share; a token that is less than the least.
                uniforms.reshape(-1)[1:3] = 0.5, 0.0
            arguments |= {"uniforms": uniforms, "temperature": self.temperature}
        return arguments

    def _spoil(self, arguments: dict[str, Any], rng: np.random.Generator) -> None:
        starts = (
            arguments["qo_indptr"] if self.ragged else np.arange(len(self.num_nodes)) * arguments["tokens"].shape[1]
        )
        for b in range(1, len(self.num_nodes), 2):
            n = self.num_nodes[b]
            row = int(starts[b]) + int(rng.integers(1, n))
            if b % 32 == 9:  # a root with a parent, which links to itself
                name = "parents" if self.form == "parents" else "retrive_next_token"
                arguments[name].reshape(-1)[int(starts[b])] = 0
            elif b % 4 == 1:
                name = (
                    "parents" if self.form == "parents" else ("retrive_next_token", "retrive_next_sibling")[b // 4 % 2]
                )
                flat = arguments[name].reshape(-1)
                node = row - int(starts[b])
                # A cycle, a later node for a parent or an earlier one for a child, and numbers out of range.
                flat[row] = (node, n, -7, 1 << 30, n - 1 if self.form == "parents" else 0)[b // 4 % 5]
            elif not self.ragged and b % 8 == 3:
                arguments["num_nodes"][b] = (-1, arguments["tokens"].shape[1] + 1)[b // 8 % 2]
            elif "uniforms" in arguments and b % 16 == 7:
                arguments["uniforms"].reshape(-1)[row] = (1.0, -0.25, np.nan)[b // 16 % 3]
            elif "logits" in arguments:
                column = int(rng.integers(self.vocab_size))
                bad = np.full(1, np.nan, np.float32)
                arguments["logits"][row, column] = to_bfloat16(bad)[0] if self.target.endswith("bfloat16") else np.nan

    def answer(self) -> dict[str, Array]:
        inputs = self.inputs()
        if "logits" in inputs and inputs["logits"].dtype == np.uint16:
            inputs["logits"] = from_bfloat16(inputs["logits"])
        return tree_accept_batch(**inputs)

    def run(self, place: Place) -> dict[str, Array]:
        """The kernel's outputs."""
        tensors = {name: place.given(value) for name, value in self.inputs().items()}
        return arrays(place, tree_accept(**tensors, library=place.library))


@dataclass(frozen=True)
class CompactCase:
    """Paths through random nodes whose slots are scattered over a pool.

    kind: "paths"; "all": everything is accepted; "roots": nothing but the root; "swaps": paths whose sources are other
    steps' targets; "bad": every second request has something wrong with it.
    """

    num_nodes: tuple[int, ...]
    kind: str = "paths"
    layers: int = 2
    row: tuple[int, ...] = (64,)
    dtype: str = "uint16"
    page_size: int = 0  # 0: slots, else a page table
    ragged: bool = False
    gap: int = 0  # elements between rows of the pool
    offset: int = 0  # elements by which the pool misses its alignment
    separate: bool = False  # a list of layers
    slots_dtype: str = "int32"
    max_path: int | None = None

    def __str__(self) -> str:
        nodes = ",".join(map(str, self.num_nodes[:4])) + ("..." if len(self.num_nodes) > 4 else "")
        words = [f"{len(self.num_nodes)}x({nodes})", self.kind, f"{self.layers}x{'x'.join(map(str, self.row))}"]
        words += [self.dtype, f"page{self.page_size}" if self.page_size else "slots"]
        words += [word for word in ("ragged", "separate") if getattr(self, word)] + [f"gap{self.gap}"] * bool(self.gap)
        words += [f"offset{self.offset}"] * bool(self.offset)
        return "-".join(words + ["slots64"] * (self.slots_dtype == "int64"))

    def inputs(self) -> dict[str, Any]:
        """Arguments of the op and of its oracle; pools are to be written to."""
        arguments, whole = self._inputs()
        return arguments | {"pools": self._rows(whole)}

    def _inputs(self) -> tuple[dict[str, Any], Array]:
        """Arguments but pools, and the memory of the pool: [layers, slots, elements of a row and of a gap]."""
        rng = np.random.default_rng([len(self.num_nodes), sum(self.num_nodes), self.page_size, len(self.kind)])
        batch, most = len(self.num_nodes), max(*self.num_nodes, 1)
        width = min(most + 1, 1025) if self.max_path is None else self.max_path
        path, path_len = np.full((batch, width), -1, np.int32), np.zeros(batch, np.int32)
        for b, n in enumerate(self.num_nodes):
            steps = self._path(n, rng)[:width]
            path[b, : len(steps)], path_len[b] = steps, len(steps)
        arguments: dict[str, Any] = {"path": path, "path_len": path_len}
        if self.page_size:
            kv_lens = rng.integers(0, 3 * self.page_size, batch)
            pages = (kv_lens + most) // self.page_size + 1
            table = np.full((batch, int(pages.max())), -1)
            order = rng.permutation(int(pages.sum()) + 3)
            for b, count in enumerate(pages):
                table[b, :count], order = order[:count], order[count:]
            num_slots = (int(pages.sum()) + 3) * self.page_size
            arguments |= {
                "page_table": table.astype(self.slots_dtype),
                "kv_lens": kv_lens.astype(self.slots_dtype),
                "page_size": self.page_size,
                "max_q_len": most,
            }
        else:
            num_slots = 2 * batch * most + 5
            slots = rng.permutation(num_slots)[: sum(self.num_nodes)].astype(self.slots_dtype)
            if not self.ragged:
                padded = np.full((batch, most), -77, self.slots_dtype)
                ends = np.cumsum(self.num_nodes)
                for b, n in enumerate(self.num_nodes):
                    padded[b, :n] = slots[ends[b] - n : ends[b]]
                slots = padded
            arguments["node_slots"] = slots
        if self.ragged:
            arguments["qo_indptr"] = np.cumsum([0, *self.num_nodes]).astype(np.int32)
            arguments["max_q_len"] = most
        else:
            arguments["num_nodes"] = np.array(self.num_nodes, np.int32)
        shape = (self.layers, num_slots, int(np.prod(self.row)) + self.gap)
        whole = rng.integers(0, 256, (*shape, np.dtype(self.dtype).itemsize), np.uint8).view(self.dtype)[..., 0]
        if self.kind == "bad":
            self._spoil(arguments, num_slots, rng)
        return arguments, whole

    def _rows(self, whole: Any) -> Any:
        """The pool in memory that has gaps between its rows."""
        return whole[..., : int(np.prod(self.row))].reshape(*whole.shape[:2], *self.row)

    def _path(self, n: int, rng: np.random.Generator) -> list[int]:
        if n == 0:
            return []
        if self.kind in ("all", "roots"):
            return list(range(n if self.kind == "all" else 1))
        if self.kind == "swaps":
            return [0, *range(2, n)]
        return [0, *(node for node in range(1, n) if rng.random() < 0.4)]

    def _spoil(self, arguments: dict[str, Any], num_slots: int, rng: np.random.Generator) -> None:
        path, path_len = arguments["path"], arguments["path_len"]
        for b in range(1, len(self.num_nodes), 2):
            n, kind = self.num_nodes[b], b // 2 % 6
            if kind == 0:
                path[b, :3], path_len[b] = (0, 2, 1), 3
            elif kind == 1:
                path[b, :2], path_len[b] = (0, (n, 1 << 30)[b // 12 % 2]), 2
            elif kind == 2:
                path_len[b] = (-1, n + 1, 1 << 30)[b // 12 % 3]
            elif kind == 3:
                path[b, :1], path_len[b] = 1, 1
            elif kind == 4 and not self.ragged:
                arguments["num_nodes"][b] = (-1, max(self.num_nodes) + 1)[b // 12 % 2]
            elif self.page_size:
                table = arguments["page_table"]
                # The product of the second with the page size is the page size, modulo 2^64.
                bad = (-1, 2**64 // self.page_size + 1)[b // 12 % 2 if self.slots_dtype == "int64" else 0]
                table[b, int(arguments["kv_lens"][b]) // self.page_size] = bad
                arguments["kv_lens"][b] = (-1, arguments["kv_lens"][b], 1 << 30)[b // 12 % 3]
            else:
                slots = arguments["node_slots"]
                row = slots[b] if slots.ndim == 2 else slots[sum(self.num_nodes[:b]) :]
                row[rng.integers(n)] = (-1, num_slots, 1 << 30)[b // 12 % 3]

    def answer(self) -> dict[str, Array]:
        return kv_compact_oracle(**self.inputs())

    def run(self, place: Place) -> dict[str, Array]:
        """The kernel's outputs, and `pools` as they are afterwards; gaps between rows must be as they were."""
        inputs, before = self._inputs()
        whole = place.strided(np.append(np.zeros(self.offset, before.dtype), before))[self.offset :].reshape(
            before.shape
        )
        pools = self._rows(whole)
        tensors = {name: place.given(value) for name, value in inputs.items()}
        steps = [tensors.pop(name) for name in ("path", "path_len")]
        given = [pools[layer] for layer in range(self.layers)] if self.separate else pools
        out = arrays(place, kv_compact(given, *steps, **tensors, library=place.library))
        after = place.array(whole)
        gap = slice(after.shape[-1] - self.gap, None)
        np.testing.assert_array_equal(after[..., gap], before[..., gap])
        return out | {"pools": self._rows(after)}


def arrays(place: Place, outputs: Any) -> dict[str, Array]:
    """A NamedTuple of tensors as arrays by name."""
    return {name: place.array(tensor) for name, tensor in outputs._asdict().items()}


class Padded:
    """Memory like `array`'s between two bands, all of it garbage: as int8, -17."""

    def __init__(self, place: Place, array: Array) -> None:
        self._place, self._size = place, array.nbytes
        # Of no alignment but the elements' own.
        self._band = 64 + array.itemsize
        self._buffer = place.strided(np.full(self._size + 2 * self._band, -17, np.int8))
        live = self._buffer[self._band : self._band + self._size]
        name = array.dtype.name
        if place.kind == "host":
            self.tensor: Any = live.view(array.dtype).reshape(array.shape)
        else:
            import torch

            self.tensor = live.view(getattr(torch, {"uint64": "int64"}.get(name, name))).reshape(array.shape)

    def check(self) -> None:
        """The bands are as they were."""
        whole = self._place.array(self._buffer)
        assert (whole[: self._band] == -17).all(), "written before the memory"
        assert (whole[self._band + self._size :] == -17).all(), "written behind the memory"


def _whole(array: Any) -> Array:
    dense: Array = np.ascontiguousarray(array)
    return dense.view(np.uint8) if dense.dtype.kind == "f" else dense.astype(np.uint64)


def differences(outputs: dict[str, Array], answer: dict[str, Array]) -> list[str]:
    """Names of the outputs that are not what the oracle says, whatever the integers' width."""
    assert outputs.keys() == answer.keys()
    return [name for name, right in answer.items() if not np.array_equal(_whole(outputs[name]), _whole(right))]


BUILD_CASES = [
    BuildCase(3, 8, 16, 65),
    BuildCase(2, 32, 64, 1025, "permutations"),
    BuildCase(2, 32, 64, 1025),
    BuildCase(4, 15, 8, 257, "permutations"),
    BuildCase(3, 15, 8, 257, "bfloat16"),
    BuildCase(32, 4, 5, 100, "bfloat16", seed=2),  # ties of two of a lane's nodes alone
    BuildCase(32, 3, 4, 64, "permutations", seed=1),  # ties that depend on the order of a sibling's sum
    BuildCase(2, 5, 33, 130, "equal"),
    BuildCase(4, 7, 6, 64, "certain"),
    BuildCase(5, 4, 5, 63, "holes"),
    BuildCase(4, 3, 4, 200),  # more room than there are prefixes
    BuildCase(9, 6, 9, 40, ragged=True),
    BuildCase(5, 7, 1, 8),  # a chain
    BuildCase(3, 1, 64, 64),  # one level
    BuildCase(2, 2, 3, 1),  # the root alone
    BuildCase(2, 0, 3, 5),  # nothing drafted
    BuildCase(48, 5, 6, 21, "bad"),
    BuildCase(24, 2, 64, 21, "bad"),
    BuildCase(256, 3, 3, 9, ragged=True),
    BuildCase(3, 6, 8, 33, token_dtype="int64"),
    BuildCase(3, 6, 8, 33, index_dtype="int64"),
    BuildCase(3, 6, 8, 33, token_dtype="int64", index_dtype="int64"),
]

ACCEPT_CASES = [
    AcceptCase((17, 1, 9)),
    AcceptCase((1025,), vocab_size=3),
    AcceptCase((1025, 64), form="links", vocab_size=3),
    AcceptCase((33, 0, 65, 2), ragged=True),
    AcceptCase((33, 0, 65, 2), form="links", ragged=True, index_dtype="int64"),
    AcceptCase((40,) * 8, kind="repeats", vocab_size=3),
    AcceptCase((40,) * 8, kind="repeats", form="links", vocab_size=3),
    AcceptCase((20, 30), max_path=64, token_dtype="int64"),
    AcceptCase((60,) * 12, max_path=3, vocab_size=3),  # some paths do not fit
    AcceptCase((12,) * 80, kind="bad"),
    AcceptCase((12,) * 80, kind="bad", form="links"),
    AcceptCase((12,) * 40, kind="bad", ragged=True),
    AcceptCase((9,) * 80, "argmax", kind="bad"),
    AcceptCase((9,) * 96, "sample", kind="bad", form="links"),
    *(
        AcceptCase((9, 5), f"{target}{dtype}", vocab_size=vocab_size, stride=stride)
        for target in ("argmax", "sample")
        for dtype in ("", "-bfloat16")
        for vocab_size, stride in ((1, 0), (7, 0), (260, 0), (4099, 3), (20000, 8))
    ),
    AcceptCase((300,), "argmax-bfloat16", vocab_size=130),
    AcceptCase((5, 4), "sample", vocab_size=5000, temperature=0.05, ragged=True),
    AcceptCase((5, 4), "sample", vocab_size=5000, temperature=8.0),
]

COMPACT_CASES = [
    CompactCase((9, 5, 1)),
    CompactCase((33, 0, 65, 2), layers=1, row=(576,)),
    CompactCase((33, 0, 65, 2), layers=3, row=(576,), ragged=True, slots_dtype="int64"),
    CompactCase((17,) * 4, "swaps", layers=61, row=(576,)),
    CompactCase((17, 9), "all"),
    CompactCase((17, 9), "roots"),
    CompactCase((1025, 3), "swaps", layers=2, row=(8,)),
    CompactCase((9, 5, 20), layers=3, row=(2, 37), dtype="uint8"),
    CompactCase((9, 5, 20), layers=2, row=(656,), dtype="uint8"),
    CompactCase((9, 5, 20), layers=2, row=(5,), dtype="float32"),
    CompactCase((9, 5, 20), layers=2, row=(3,), dtype="uint16", separate=True),
    CompactCase((9, 5, 20), layers=4, row=(64,), separate=True),
    CompactCase((9, 5, 20), layers=2, row=(64,), gap=8),
    CompactCase((9, 5, 20), layers=2, row=(64,), gap=3),
    CompactCase((9, 5, 20), layers=3, row=(64,), gap=1, separate=True),
    CompactCase((9, 5, 20), layers=3, row=(64,), offset=1),
    CompactCase((9, 5, 20), layers=3, row=(64,), offset=2, separate=True),
    CompactCase((9, 5, 20), layers=3, row=(64,), offset=1, separate=True),
    *(CompactCase((9, 5, 20), page_size=size) for size in (1, 16, 64, 256)),
    CompactCase((9, 5, 20), page_size=64, slots_dtype="int64", ragged=True),
    CompactCase((3,) * 300, row=(16,)),
    CompactCase((11,) * 48, "bad"),
    CompactCase((11,) * 48, "bad", ragged=True),
    CompactCase((11,) * 48, "bad", page_size=16),
    CompactCase((11,) * 48, "bad", page_size=16, slots_dtype="int64"),
]

# By the op that they are for.
CASES: dict[str, list[Any]] = {
    "tree_build": list(BUILD_CASES),
    "tree_accept": list(ACCEPT_CASES),
    "kv_compact": list(COMPACT_CASES),
}
