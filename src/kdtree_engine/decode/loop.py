"""The decode loop: draft, build, verify, accept, compact, for a batch of requests over one paged latent pool."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kdtree_engine.errors import DecodeError
from kdtree_engine.ops.kv_compact import kv_compact
from kdtree_engine.ops.tree_accept import tree_accept
from kdtree_engine.ops.tree_build import tree_build
from kdtree_engine.ops.verify_attn_paged import verify_attn_paged
from kdtree_engine.request_status import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from kdtree_engine._native import Library
    from kdtree_engine.decode.drafters import Drafter
    from kdtree_engine.decode.model import MlaModel
    from kdtree_engine.ops.kv_compact import Compaction
    from kdtree_engine.ops.tree_accept import Acceptance
    from kdtree_engine.ops.tree_build import DraftTree

    NumpyArray = npt.NDArray[Any]

# How far attention in bfloat16 may move a logit of the tiny model: the largest budget that its bundles declare.
LOGIT_BUDGET = 0.2007
_CHUNK = 256  # prompt tokens that go through the target at once, the most nodes that the kernel takes


@dataclass(frozen=True)
class Round:
    """What one round did for one request; round 0 is the prompt and has no tree."""

    request: int
    number: int
    tokens: list[int]  # of the tree's nodes, root first
    parents: list[int]
    path: list[int]  # accepted nodes
    new: list[int]  # tokens that the text grows by
    margins: list[float]  # how clearly each was chosen: greedy, by how much its logit leads; drawn, how far its uniform
    # is from that of another token


@dataclass
class _Request:
    index: int
    tokens: list[int]  # the last one is not in the cache yet
    uniforms: NumpyArray  # float32, by position
    slots: NumpyArray = field(default_factory=lambda: np.zeros(0, np.int64))  # of the tokens in the cache
    states: list[Any] = field(default_factory=list)  # the target's, of the tokens in the cache
    produced: int = 0
    rounds: int = 0


class Decoder:
    """Decodes texts by draft trees; with a budget of 0 plainly, a token a round.

    A token at position p of request r is drawn by a uniform that depends on the seed, r and p alone. That, and a target
    whose logits do not depend on how a node came about, makes a text independent of drafter, budget and batch.
    """

    def __init__(
        self,
        model: MlaModel,
        drafter: Drafter | None = None,
        *,
        budget: int = 0,
        width: int = 16,
        temperature: float = 0.0,
        seed: int = 0,
        library: Library | None = None,
    ) -> None:
        """Checks the settings.

        Args:
            model: the target.
            drafter: proposes; may be None where budget is 0.
            budget: nodes of a tree below its root, 0 to 255.
            width: candidates a depth, 1 to 64; 1 makes chains.
            temperature: of the law that tokens are drawn from; 0 takes the most probable.
            seed: of the uniforms.
            library: kernels to take instead of the usual ones of the model's place.

        Raises:
            DecodeError: a setting out of range.
        """
        if not 0 <= budget <= 255:
            raise DecodeError("budget", f"got {budget}, expected 0..255; verify attention takes 256 nodes a request")
        if not 1 <= width <= 64:
            raise DecodeError("width", f"got {width}, expected 1..64; keep fewer candidates a depth")
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise DecodeError("temperature", f"got {temperature}, expected a finite number >= 0; 0 is greedy")
        if drafter is None and budget > 0:
            raise DecodeError("drafter", f"got None with a budget of {budget}; pass one, or a budget of 0")
        self._model, self._arrays, self._drafter = model, model.arrays, drafter
        self._depth = 0 if drafter is None or budget == 0 else drafter.depth
        # A chain has no more nodes than there are depths.
        self._max_nodes = 1 + (min(budget, self._depth) if width == 1 else budget)
        self._width = min(width, model.vocab_size)
        self._temperature, self._seed, self._library = temperature, seed, library

    @property
    def undecided(self) -> float:
        """Margins that rounding may turn: two logits move by the budget at most, and e^(2 D) - 1 times c (1 - c) is as
        far as that moves a cumulative probability c."""
        return 2 * LOGIT_BUDGET if self._temperature == 0 else math.expm1(2 * LOGIT_BUDGET) / 4

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Iterator[Round]:
        """Decodes `max_tokens` tokens after each prompt, in one batch; gives each request's rounds as they are done.

        Raises:
            DecodeError: a prompt that is empty, too long or has a token that the model lacks.
        """
        self._check(prompts, max_tokens)
        requests = [self._request(index, prompt, max_tokens) for index, prompt in enumerate(prompts)]
        # Slots in no order, as a cache has them after a while.
        most = sum(len(prompt) + max_tokens + 2 * self._max_nodes for prompt in prompts)
        self._pools = self._arrays.zeros((self._model.num_layers, most, self._model.d_latent + self._model.d_rope))
        self._free = np.random.default_rng(self._seed).permutation(most).astype(np.int64)
        yield from self._cut(self._prefill(requests), max_tokens)
        while requests := [request for request in requests if request.produced < max_tokens]:
            yield from self._cut(self._round(requests), max_tokens)

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        if max_tokens < 1:
            raise DecodeError("max_tokens", f"got {max_tokens}, expected at least 1")
        if not prompts:
            raise DecodeError("prompts", "got none, expected at least one")
        for prompt in prompts:
            room = self._model.max_positions - max_tokens - self._depth
            if not 1 <= len(prompt) <= room:
                raise DecodeError("prompts", f"got {len(prompt)} tokens, expected 1..{room} before {max_tokens} more")
            if not all(0 <= token < self._model.vocab_size for token in prompt):
                raise DecodeError("prompts", f"a token is outside 0..{self._model.vocab_size - 1}; encode it as bytes")

    def _request(self, index: int, prompt: Sequence[int], max_tokens: int) -> _Request:
        length = len(prompt) + max_tokens + self._depth + 1
        uniforms = np.random.default_rng([self._seed, index]).random(length, np.float32)
        return _Request(index, list(prompt), uniforms)

    @staticmethod
    def _cut(rounds: list[tuple[_Request, Round]], max_tokens: int) -> Iterator[Round]:
        """Counts what was produced, and leaves out what is too much."""
        for request, done in rounds:
            new = done.new[: max_tokens - request.produced]
            request.produced += len(new)
            yield replace(done, new=new, margins=done.margins[: len(new)])

    def _take(self, count: int) -> NumpyArray:
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _forward(
        self, requests: list[_Request], counts: NumpyArray, slots: Any, tokens: Any, positions: Any, **tree: Any
    ) -> tuple[Any, Any]:
        """Logits and states of nodes, whose rows are put into their slots."""
        here = self._arrays.array
        lengths = [len(request.slots) for request in requests]
        arguments = {
            "qo_indptr": here(np.cumsum([0, *counts])),
            "kv_indptr": here(np.cumsum([0, *lengths])),
            "kv_indices": here(np.concatenate([request.slots for request in requests])),
            "draft_slots": slots,
            "sm_scale": self._model.sm_scale,
            "d_latent": self._model.d_latent,
            "max_q_len": int(max(counts)),
            "max_kv_len": max(lengths),
            "out_dtype": "float32",
            "library": self._library,
            **tree,
        }

        def attend(layer: int, q: Any, rows: Any) -> Any:
            self._pools[layer][slots] = rows
            return verify_attn_paged(q, self._pools[layer], **arguments)[0]

        return self._model.forward(tokens, positions, attend)

    def _uniforms(self, requests: list[_Request], positions: NumpyArray) -> Any:
        """Those of the tokens behind nodes at positions [batch, nodes]."""
        rows = [request.uniforms[after] for request, after in zip(requests, positions + 1, strict=True)]
        return self._arrays.array(np.stack(rows))

    def _target(self, requests: list[_Request], logits: Any, positions: NumpyArray) -> dict[str, Any]:
        """What tree_accept needs to choose each node's next token."""
        if self._temperature == 0:
            return {"logits": logits}
        uniforms = self._uniforms(requests, positions)
        return {"logits": logits, "uniforms": uniforms, "temperature": self._temperature}

    def _prefill(self, requests: list[_Request]) -> list[tuple[_Request, Round]]:
        """The prompts through the target, a chunk of each at a time, and the token behind each."""
        last: list[Any] = [None] * len(requests)
        for first in range(0, max(len(request.tokens) for request in requests), _CHUNK):
            chunks = [request.tokens[first : first + _CHUNK] for request in requests]
            counts = np.array([len(chunk) for chunk in chunks])
            slots = self._take(int(counts.sum()))
            tokens = self._arrays.array(np.concatenate(chunks).astype(np.int64))
            positions = np.concatenate([np.arange(first, first + count) for count in counts])
            logits, states = self._forward(
                requests, counts, self._arrays.array(slots), tokens, self._arrays.array(positions)
            )
            ends = np.cumsum(counts)
            for b, (request, count, end) in enumerate(zip(requests, counts, ends, strict=True)):
                if count:
                    request.slots = np.append(request.slots, slots[end - count : end])
                    request.states.append(states[int(end - count) : int(end)])
                    last[b] = logits[int(end) - 1]
        positions = np.array([[len(request.tokens) - 1] for request in requests])
        roots = np.array([[request.tokens[-1]] for request in requests], np.int64)
        chosen = tree_accept(
            self._arrays.array(roots),
            parents=self._arrays.array(np.full(roots.shape, -1, np.int32)),
            library=self._library,
            **self._target(requests, self._arrays.xp.stack(last), positions),
        )
        self._good(requests, "tree_accept", chosen.status)
        results = []
        for request, bonus, row in zip(requests, self._arrays.host(chosen.bonus).tolist(), last, strict=True):
            margins = self._margins(request, row[None], [bonus])
            request.tokens.append(bonus)
            results.append((request, Round(request.index, 0, [], [], [], [bonus], margins)))
        return results

    def _margins(self, request: _Request, logits: Any, new: list[int]) -> list[float]:
        """Of tokens that come next, from the logits [len(new), V] that they were chosen by."""
        rows = self._arrays.host(logits).astype(np.float64)
        if self._temperature == 0:
            second, first = np.partition(rows, -2, axis=-1)[:, -2:].T
            return [float(margin) for margin in first - second]
        weights = np.exp((rows - rows.max(-1, keepdims=True)) / self._temperature)
        upper = np.cumsum(weights / weights.sum(-1, keepdims=True), axis=-1)
        edges = np.insert(upper, 0, 0.0, axis=-1)
        drawn = np.array(new)[:, None]
        uniforms = request.uniforms[len(request.tokens) :][: len(new), None]
        # Beyond the first and the last token there is none.
        edges[:, 0], edges[:, -1] = -np.inf, np.inf
        gaps = np.abs(np.take_along_axis(edges, np.concatenate([drawn, drawn + 1], axis=-1), -1) - uniforms)
        return [float(margin) for margin in gaps.min(-1)]

    def _drafts(self, requests: list[_Request]) -> tuple[Any, Any]:
        """Candidates of every request: log-probabilities float32 and tokens int32, [batch, depth, width]."""
        if self._depth == 0 or self._drafter is None:
            shape = (len(requests), 0, 1)
            return self._arrays.array(np.zeros(shape, np.float32)), self._arrays.array(np.zeros(shape, np.int64))
        rows = []
        for request in requests:
            if len(request.states) > 1:
                request.states = [self._arrays.xp.concatenate(request.states, axis=0)]
            rows.append(self._drafter.draft(request.tokens, request.states[0], self._model.embedding))
        values, ids = self._arrays.best(self._arrays.xp.stack(rows), self._width)
        return values, self._arrays.xp.asarray(ids, dtype=self._arrays.xp.int64)

    def _round(self, requests: list[_Request]) -> list[tuple[_Request, Round]]:
        batch, nodes, library = len(requests), self._max_nodes, self._library
        here, host = self._arrays.array, self._arrays.host
        starts = np.array([len(request.slots) for request in requests])
        log_probs, token_ids = self._drafts(requests)
        tree = tree_build(
            log_probs,
            token_ids,
            here(np.array([request.tokens[-1] for request in requests], np.int64)),
            max_nodes=nodes,
            seq_lens=here(starts),
            index_dtype="int64",
            library=library,
        )
        self._good(requests, "tree_build", tree.status)

        slots = self._take(batch * nodes)
        node_slots = here(slots.reshape(batch, nodes))
        # Rows behind a tree's nodes are roots that nobody reads.
        logits, states = self._forward(
            requests,
            np.full(batch, nodes),
            here(slots),
            tree.tokens.reshape(-1),
            tree.positions.reshape(-1),
            parents=tree.parents.reshape(-1),
        )
        accepted = tree_accept(
            tree.tokens,
            retrive_next_token=tree.retrive_next_token,
            retrive_next_sibling=tree.retrive_next_sibling,
            num_nodes=tree.num_nodes,
            max_path=self._depth + 1,
            library=library,
            **self._target(requests, logits, host(tree.positions)),
        )
        self._good(requests, "tree_accept", accepted.status)
        kept = kv_compact(
            self._pools,
            accepted.path,
            accepted.path_len,
            node_slots=node_slots,
            num_nodes=tree.num_nodes,
            library=library,
        )
        self._good(requests, "kv_compact", kept.status)
        results = (tree, accepted, kept)
        return self._commit(requests, slots.reshape(batch, nodes), logits, states, results)

    def _commit(
        self,
        requests: list[_Request],
        slots: NumpyArray,
        logits: Any,
        states: Any,
        results: tuple[DraftTree, Acceptance, Compaction],
    ) -> list[tuple[_Request, Round]]:
        """What the host has to know of a round: tokens, and whose the slots are."""
        host, (tree, accepted, kept) = self._arrays.host, results
        tokens, parents, counts = host(tree.tokens), host(tree.parents), host(tree.num_nodes)
        paths, lengths, bonus = host(accepted.path), host(accepted.path_len), host(accepted.bonus)
        committed, free, num_free = host(kept.committed_slots), host(kept.free_slots), host(kept.num_free)
        logits, states = logits.reshape(*slots.shape, -1), states.reshape(*slots.shape, -1)
        rounds = []
        for b, request in enumerate(requests):
            path = paths[b, : lengths[b]].tolist()
            new = [*tokens[b, path[1:]].tolist(), int(bonus[b])]
            margins = self._margins(request, logits[b][path], new)
            request.tokens += new
            request.slots = np.append(request.slots, committed[b, : lengths[b]])
            self._free = np.concatenate([self._free, free[b, : num_free[b]], slots[b, counts[b] :]])
            if self._depth:
                request.states.append(states[b][path])
            request.rounds += 1
            drawn = tokens[b, : counts[b]].tolist(), parents[b, : counts[b]].tolist()
            rounds.append((request, Round(request.index, request.rounds, *drawn, path, new, margins)))
        return rounds

    def _good(self, requests: list[_Request], op: str, status: Any) -> None:
        """Raises for the first request whose status is not good."""
        for request, word in zip(requests, self._arrays.host(status).tolist(), strict=True):
            if word:
                raise DecodeError(op, f"request {request.index}: {RequestStatus(word).describe()}; look at its inputs")
