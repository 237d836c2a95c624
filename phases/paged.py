"""The paged op's inputs, made from sizes or from a bundle, and the oracle's answer to them.

The values of a case depend on its sizes alone, not on its layout, so that two cases which differ in their layout only,
say in the form of the mask or in the page size, ask the same question.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kdtree_engine.bundle import Bundle, from_bfloat16, to_bfloat16
from kdtree_engine.compare import compare
from kdtree_engine.ops.verify_attn_paged import LSE_ABS, OUT_REL_L2, OUT_ROW_REL_L2
from oracle.verify_attn_paged import verify_attn_paged

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from phases.exactness import DenseVerifyAttn

    Array = npt.NDArray[Any]

FORMS = ("causal", "mask", "mask_bits", "parents", "full_mask")


@dataclass(frozen=True)
class Case:
    """A batch and its layout."""

    nodes: tuple[int, ...] = (9,)
    prefix: tuple[int, ...] = (70,)
    num_heads: int = 4
    d_latent: int = 512
    d_rope: int = 64
    tree: str = (
        "random"  # chain; random: a tree, its nodes in any order; any: any cells, one node sees no draft, one is unseen
    )
    form: str = "mask"  # one of FORMS; causal takes a chain, parents a chain or a random tree
    page_size: int = 1  # 1: kv_indptr and kv_indices, else a page table
    pool_drafts: bool = False  # drafts lie in the pool already
    strided: bool = False  # no row, head, slot or mask follows its predecessor without a gap
    int64: tuple[str, ...] = ()  # index arrays of 64 bits
    spare: int = 5  # rows, slots, pages and indices that belong to nobody; they hold poison or garbage
    spread: float = 2.0  # standard deviation of the scores
    logit_cap: float = 0.0
    skip: str = ""  # prefix, or draft: what the call leaves out
    out_dtype: str = "bfloat16"
    split_tokens: int = 0
    hints: bool = True  # the call names the largest request and, without a split, the longest prefix

    def __str__(self) -> str:
        """What differs from the default case, as a test id."""
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                text = "_".join(map(str, value)) if isinstance(value, tuple) else value
                parts.append(field.name if value is True else f"{field.name}={text}")
        return ",".join(parts) or "default"

    @property
    def width(self) -> int:
        return self.d_latent + self.d_rope

    @property
    def live(self) -> slice:
        """Rows of q that belong to a request; the others are spare."""
        return slice(0, sum(self.nodes))

    def options(self) -> dict[str, Any]:
        """Arguments of the op that ask for the same result in another way."""
        options: dict[str, Any] = {"out_dtype": self.out_dtype, "split_tokens": self.split_tokens}
        if self.hints:
            options["max_q_len"] = max(1, *self.nodes)
        if self.hints or self.split_tokens:
            options["max_kv_len"] = max(self.prefix)
        return options

    def inputs(self, poison: float = math.nan) -> dict[str, Any]:
        """The op's other arguments, in NumPy; `poison` is in every element that must not be read."""
        draw = self._draw()
        rng = np.random.default_rng([len(self.nodes), self.page_size])
        layout = self._indices(rng)
        slots, num_slots = layout.pop("slots"), layout.pop("num_slots")
        pool = self._rows(num_slots, poison)
        drafts = self._rows(sum(self.nodes) + self.spare, poison)
        q = self._queries(poison)
        q[self.live] = draw.q
        for b, keys in enumerate(draw.keys):
            if self.nodes[b] == 0:
                continue  # not even the prefix of a request without nodes is read
            unseen = np.flatnonzero(~draw.visible[b].any(axis=0)) + self.prefix[b]
            keys = keys.copy()
            keys[unseen] = _bits(poison)
            pool[slots[b]] = keys[: len(slots[b])]
            drafts[self._nodes(b)] = keys[self.prefix[b] :]
        inputs = {
            "q": q,
            "kv_pool": pool.reshape(-1, self.page_size, self.width) if self.page_size > 1 else pool,
            "sm_scale": self.spread * self.width**-0.5,
            "d_latent": self.d_latent,
            "logit_cap": self.logit_cap,
            **layout,
            **self._visibility(draw),
            **({f"skip_{self.skip}": True} if self.skip else {}),
        }
        return inputs if self.pool_drafts else inputs | {"draft_kv": drafts}

    def answer(self) -> tuple[Array, Array]:
        """The oracle's out and lse of the live rows; one for all cases that differ in what does not change it."""
        return _answer(
            dataclasses.replace(self, out_dtype="bfloat16", split_tokens=0, hints=True, int64=(), strided=False)
        )

    def last_drafts(self, poison: float) -> tuple[dict[str, Any], Array]:
        """The argument in which every request's last draft is poisoned, and which live rows see such a draft."""
        inputs, draw = self.inputs(poison), self._draw()
        last = np.cumsum(self.nodes)[np.array(self.nodes) > 0] - 1
        if self.pool_drafts:
            name = "kv_pool"
            slots = inputs["draft_slots"][last]
            inputs[name][np.unravel_index(slots, inputs[name].shape[:-1])] = _bits(poison)
        else:
            name = "draft_kv"
            inputs[name][last] = _bits(poison)
        return {name: inputs[name]}, np.concatenate([visible[:, -1] for visible in draw.visible if len(visible)])

    def _draw(self) -> _Draw:
        return _draw(self.nodes, self.prefix, self.num_heads, self.width, self.tree)

    def _nodes(self, request: int) -> slice:
        start = sum(self.nodes[:request])
        return slice(start, start + self.nodes[request])

    def _queries(self, poison: float) -> Array:
        shape = (sum(self.nodes) + self.spare, self.num_heads, self.width)
        if not self.strided:
            return np.full(shape, _bits(poison))
        whole = np.full((shape[1] + 1, shape[0] + 1, shape[2] + 24), _bits(poison))
        return whole[1:, 1:, :-24].transpose(1, 0, 2)

    def _rows(self, count: int, poison: float) -> Array:
        return np.full((count, self.width + (8 if self.strided else 0)), _bits(poison))[:, : self.width]

    def _indices(self, rng: np.random.Generator) -> dict[str, Any]:
        """Index arrays; what lies behind their live part points outside the pool, or at poison."""
        stored = [p + (n if self.pool_drafts else 0) for p, n in zip(self.prefix, self.nodes, strict=True)]
        pages = [-(-length // self.page_size) for length in stored]
        num_pages = sum(pages) + self.spare
        order = rng.permutation(num_pages)
        own = np.split(order, np.cumsum(pages))
        slots = [
            (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()[:length]
            for pages, length in zip(own, stored, strict=False)
        ]
        arrays: dict[str, Any] = {"qo_indptr": np.concatenate([[0], np.cumsum(self.nodes)])}
        garbage = np.array([-1, 2**31 - 1, *own[-1][:1], -(2**31), num_pages + 9])[: self.spare]
        if self.page_size == 1:
            arrays["kv_indptr"] = np.concatenate([[0], np.cumsum(self.prefix)])
            prefixes = [own[:length] for own, length in zip(slots, self.prefix, strict=True)]
            arrays["kv_indices"] = np.concatenate([*prefixes, garbage])
        else:
            table = np.resize([*garbage, -1], (len(pages), max(1, *pages) + self.spare + (3 if self.strided else 0)))
            for row, page in zip(table, own, strict=False):
                row[: len(page)] = page
            arrays["page_table"] = table
            arrays["kv_lens"] = np.array(self.prefix)
        if self.pool_drafts:
            drafts = [own[length:] for own, length in zip(slots, self.prefix, strict=True)]
            arrays["draft_slots"] = np.concatenate([*drafts, garbage])
        typed = {name: array.astype(np.int64 if name in self.int64 else np.int32) for name, array in arrays.items()}
        if self.page_size > 1 and self.strided:
            typed["page_table"] = typed["page_table"][:, :-3]
        sizes = {"page_size": self.page_size, "slots": slots, "num_slots": num_pages * self.page_size}
        return typed | sizes

    def _visibility(self, draw: _Draw) -> dict[str, Any]:
        if self.form == "causal":
            return {}
        if self.form == "parents":
            return {"parents": np.concatenate([*draw.parents, np.full(self.spare, 7)]).astype(np.int32)}
        if self.form == "mask_bits":
            words = 4 if self.strided else max(1, -(-max(self.nodes) // 64))
            bits = np.full((sum(self.nodes) + self.spare, words), 2**64 - 1, np.uint64)
            for b, visible in enumerate(draw.visible):
                for row, seen in zip(bits[self._nodes(b)], visible, strict=True):
                    # Bits past the last node are garbage.
                    for j in np.flatnonzero(~seen).tolist():
                        row[j // 64] &= ~np.uint64(1 << j % 64)
            return {"mask_bits": bits}
        # Nonzero is visible, and so no cell between two requests' may be taken for one of theirs.
        gap = self.spare if self.strided else 0
        cells, begin = [np.full(gap, 255, np.uint8)], [gap]
        for visible, prefix in zip(draw.visible, self.prefix, strict=True):
            ignored = prefix if self.form == "full_mask" else 0
            rows = np.zeros((len(visible), ignored + len(visible)), np.uint8)
            rows[:, :ignored:2] = 1  # prefix columns do not count
            rows[:, ignored:] = visible * np.uint8(2)
            cells += [rows.ravel(), np.full(gap, 255, np.uint8)]
            begin.append(begin[-1] + rows.size + gap)
        indptr = {"mask_indptr": np.array(begin, np.int64)} if self.strided else {}
        return {self.form: np.concatenate(cells), **indptr}


@dataclass(frozen=True, eq=False)
class _Draw:
    """Values: bfloat16 bits q [T, H, d] and, a request, keys [P + n, d], visible [n, n] and, of a tree, parents [n]."""

    q: Array
    keys: list[Array]
    visible: list[Array]
    parents: list[Array]


@functools.cache
def _draw(nodes: tuple[int, ...], prefix: tuple[int, ...], num_heads: int, width: int, tree: str) -> _Draw:
    rng = np.random.default_rng([*nodes, *prefix, num_heads, width, *tree.encode()])

    def normal(*shape: int) -> Array:
        return to_bfloat16(rng.standard_normal(shape, np.float32))

    q = normal(sum(nodes), num_heads, width)
    keys = [normal(p + n, width) for p, n in zip(prefix, nodes, strict=True)]
    parents = [_parents(rng, n, tree) for n in nodes]
    return _Draw(q, keys, [_visible(rng, own, tree) for own in parents], parents)


def _parents(rng: np.random.Generator, n: int, tree: str) -> Array:
    parents = np.arange(n) - 1
    if tree != "chain" and n:
        parents[1:] = [rng.integers(0, i) for i in range(1, n)]
        # Node names are dealt anew: a parent need not come before its children.
        name = rng.permutation(n)
        renamed = np.empty(n, np.int64)
        renamed[name] = np.where(parents < 0, -1, name[parents])
        return renamed
    return parents


def _visible(rng: np.random.Generator, parents: Array, tree: str) -> Array:
    n = len(parents)
    if tree == "any":
        visible: Array = rng.random((n, n)) < 0.6
        visible[n // 2 : n // 2 + 1] = False
        visible[:, n // 3 : n // 3 + 1] = False
        return visible
    visible = np.eye(n, dtype=bool)
    for node in range(n):
        ancestor = int(parents[node])
        while ancestor >= 0:
            visible[node, ancestor] = True
            ancestor = int(parents[ancestor])
    return visible


def _bits(value: float) -> Any:
    return to_bfloat16(np.full(1, value, np.float32))[0]


@functools.cache
def _answer(case: Case) -> tuple[Array, Array]:
    out, lse = verify_attn_paged(**case.inputs())
    return out[case.live], lse[case.live]


def as_floats(out: Array) -> Array:
    """out as it is stored, bfloat16 bits or float32, as float32."""
    return from_bfloat16(out) if out.dtype == np.uint16 else out


def problems(actual: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[list[str], dict[str, float]]:
    """Where out (as stored) and lse are outside the op's tolerance, and the errors as figures for evidence.

    A row that sees nothing must be 0 exactly.
    """
    out, lse = as_floats(actual[0]), actual[1]
    outs, lses = compare(out, right[0], name="out"), compare(lse, right[1], name="lse")
    found = [] if outs.within(rel_l2=OUT_REL_L2, row_rel_l2=OUT_ROW_REL_L2) else [outs.report()]
    found += [] if lses.within(max_abs=LSE_ABS) else [lses.report()]
    found += [] if (out[np.isneginf(right[1])] == 0).all() else ["out: a row that sees nothing is not 0"]
    return found, {"out_rel_l2": outs.rel_l2, "out_row_rel_l2": outs.row_rel_l2, "lse_max_abs": lses.max_abs}


def behind_the_dense_interface(
    bundle: Bundle, call: Callable[..., tuple[Array, Array]], *, page_size: int = 1, form: str = "mask"
) -> DenseVerifyAttn:
    """The paged op `call` on the bundle's batch, for judges that speak the dense one.

    With page_size 1, all keys lie where the bundle has them; else in pages of their own, in random order, and the
    drafts beside the pool. Every slot that belongs to nobody holds NaN.
    """
    prefix_len, num_nodes = bundle.request.prefix_len.tolist(), bundle.request.num_nodes.tolist()
    live = bundle.request.kv_indptr.tolist()
    rng = np.random.default_rng(page_size)
    pages = [-(-prefix // page_size) for prefix in prefix_len]
    own = np.split(rng.permutation(sum(pages) + 3), np.cumsum(pages))

    def dense(q: Array, kv: Array, *, sm_scale: float, mask: Array, kv_len: Array) -> tuple[Array, Array]:
        batch = range(bundle.batch)
        rows = [to_bfloat16(kv[b, : kv_len[b]]) for b in batch]
        cells = []
        for b, (prefix, n) in enumerate(zip(prefix_len, num_nodes, strict=True)):
            assert mask[b, :n, :prefix].all(), "the paged op has no mask for the prefix"
            assert kv_len[b] == prefix + n
            cells.append(mask[b, :n, prefix if form == "mask" else 0 : prefix + n].ravel())
        arguments: dict[str, Any] = {
            "qo_indptr": bundle.request.qo_indptr,
            form: np.concatenate(cells),
            "sm_scale": sm_scale,
            "d_latent": bundle.d_latent,
        }
        if page_size == 1:
            pool = np.full((bundle.num_slots, bundle.width), _bits(math.nan))
            pool[bundle.request.kv_indices] = np.concatenate(rows)
            slots = np.split(bundle.request.kv_indices, live[1:-1])
            arguments |= {
                "kv_indptr": np.concatenate([[0], np.cumsum(prefix_len)]).astype(np.int32),
                "kv_indices": np.concatenate([slots[b][: prefix_len[b]] for b in batch]),
                "draft_slots": np.concatenate([slots[b][prefix_len[b] :] for b in batch]),
            }
        else:
            pool = np.full((sum(pages) + 3, page_size, bundle.width), _bits(math.nan))
            table = np.full((bundle.batch, max(pages) + 1), -1, np.int32)
            for b, prefix in enumerate(prefix_len):
                table[b, : pages[b]] = own[b]
                tokens = np.arange(prefix)
                pool[own[b][tokens // page_size], tokens % page_size] = rows[b][:prefix]
            arguments |= {
                "page_table": table,
                "kv_lens": np.array(prefix_len, np.int32),
                "page_size": page_size,
                "draft_kv": np.concatenate([rows[b][prefix_len[b] :] for b in batch]),
            }
        out, lse = call(to_bfloat16(bundle.unpad_nodes(q)), pool, **arguments)
        return bundle.pad_nodes(as_floats(out)), bundle.pad_nodes(lse)

    return dense


def parts(count: int, **arguments: Any) -> list[dict[str, Any]]:
    """The op's arguments for `count` ranks whose results are to be merged; each asks for float32.

    The prefix is dealt out to all ranks but the last, by slots or by pages; the drafts are the last one's.
    """
    ranks = [arguments | _dealt(arguments, rank, count - 1) | {"skip_draft": True} for rank in range(count - 1)]
    return [rank | {"out_dtype": "float32"} for rank in (*ranks, arguments | {"skip_prefix": True})]


def _dealt(arguments: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    if "page_table" in arguments:
        lengths, size = arguments["kv_lens"], arguments["page_size"]
        tokens = [np.arange(length) // size % ranks == rank for length in lengths.tolist()]
        table = arguments["page_table"][:, rank::ranks].copy()
        return {"page_table": table, "kv_lens": np.array([own.sum() for own in tokens], lengths.dtype)}
    indptr, indices = arguments["kv_indptr"], arguments["kv_indices"]
    dealt = [indices[start:stop][rank::ranks] for start, stop in itertools.pairwise(indptr)]
    lengths = np.cumsum([0, *map(len, dealt)])
    return {"kv_indices": np.concatenate(dealt), "kv_indptr": lengths.astype(indptr.dtype)}
