"""Bundles of any shape from a seed: a small random model, random context, trees that follow the model for a while.

They cover shapes where the captured bundles cover reality. Everything is a function of the arguments, bit for bit.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from kdtree_engine.bundle import Bundle, Context, Drafter, Layer, Request, Tree, from_bfloat16, to_bfloat16
from oracle import mla_model
from oracle.tree_build import tree_build, visibility
from oracle.verify_attn import verify_attn
from phases import exactness
from phases.seeded_weights import seeded_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]

VOCAB = 64
SHAPES = ("chain", "random", "drafter")


def config(num_heads: int, d_latent: int, d_rope: int, num_layers: int) -> dict[str, Any]:
    """A config.json dict of a small dense model with the given attention geometry."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "q_lora_rank": 32,
        "kv_lora_rank": d_latent,
        "qk_rope_head_dim": d_rope,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        # Scores then spread over a few units, so that the softmax is neither flat nor a single key.
        "seeded_gain": {"q_b_proj": 2.5},
    }


def synthetic(
    seed: int,
    *,
    prefix_len: Sequence[int] = (5,),
    num_nodes: Sequence[int] = (7,),
    num_heads: int = 4,
    d_latent: int = 512,
    d_rope: int = 64,
    num_layers: int = 2,
    page_size: int = 1,
    shape: str = "random",
) -> Bundle:
    """A bundle without expected outputs; `exactness.complete` adds them.

    `shape` of the trees: a "chain", a "random" tree around the model's own continuation, or what the best-first
    builder makes of a made-up "drafter" (then a tree may have fewer nodes than asked for, if the marginals run out).
    """
    rng = np.random.default_rng([seed, 1])
    settings = config(num_heads, d_latent, d_rope, num_layers)
    weights = exactness.as_float64(seeded_weights(settings, seed))
    requests = [_request(rng, weights, settings, p, n, shape) for p, n in zip(prefix_len, num_nodes, strict=True)]
    trees = [tree for _, tree, _ in requests]
    prefix = np.array(prefix_len, np.int32)
    nodes = np.array([len(tree.tokens) for tree in trees], np.int32)
    slots, num_slots = _slots(rng, (prefix + nodes).tolist(), page_size)
    tree = Tree(
        tokens=np.concatenate([tree.tokens for tree in trees]),
        parents=np.concatenate([tree.parents for tree in trees]),
        depths=np.concatenate([tree.depths for tree in trees]),
        visibility=np.concatenate([visibility(tree.parents).ravel() for tree in trees]),
    )
    bundle = Bundle(
        name=f"synthetic_{shape}_{seed}",
        page_size=page_size,
        num_slots=num_slots,
        num_heads=num_heads,
        d_latent=d_latent,
        d_rope=d_rope,
        sm_scale=mla_model.attention_scale(settings),
        origin="synthetic",
        model="seeded",
        model_config=settings,
        model_seed=seed,
        provenance={"generator": "phases.synthetic"},
        request=Request(
            prefix_len=prefix,
            num_nodes=nodes,
            qo_indptr=np.concatenate([[0], np.cumsum(nodes)]).astype(np.int32),
            kv_indptr=np.concatenate([[0], np.cumsum(prefix + nodes)]).astype(np.int32),
            kv_indices=slots,
        ),
        context=Context(tokens=np.concatenate([context for context, _, _ in requests])),
        tree=tree,
        drafter=_drafters([drafter for _, _, drafter in requests]),
        layers=(),
    )
    return dataclasses.replace(bundle, layers=_layers(bundle, weights, settings))


def testable(seed: int, **arguments: Any) -> Bundle:
    """The first complete, token-exact-testable bundle from `seed` on; arguments as for `synthetic`, bounds included."""
    bounds = {name: arguments.pop(name) for name in ("out_row_rel_l2", "bfloat16_out_row_rel_l2")}
    reasons: list[str] = []
    for candidate in range(seed, seed + 100):
        bundle = synthetic(candidate, **arguments)
        finished = exactness.complete(bundle, exactness.load_model(bundle), **bounds)
        reasons = exactness.shortcomings(finished)
        if not reasons:
            return finished
    raise ValueError(
        f"seed: none of 100 seeds from {seed} gives a testable bundle; the last was refused: {'; '.join(reasons)}"
    )


class _Grown:
    """A draft tree under construction."""

    def __init__(self, tokens: Array, parents: Array, depths: Array) -> None:
        self.tokens, self.parents, self.depths = tokens, parents, depths


_Marginals = tuple["Array", "Array", int]


def _request(
    rng: np.random.Generator,
    weights: mla_model.Weights,
    settings: dict[str, Any],
    prefix_len: int,
    num_nodes: int,
    shape: str,
) -> tuple[Array, _Grown, _Marginals | None]:
    """One request's context tokens, tree and, where there was one, drafter."""
    context = rng.integers(0, VOCAB, prefix_len).astype(np.int32)
    root = int(rng.integers(0, VOCAB))
    continuation = _continuation(weights, settings, [*context.tolist(), root], min(3, num_nodes - 1))
    if shape == "drafter":
        log_probs, token_ids = _marginals(rng, continuation, rows=4, ranks=6)
        built = tree_build(log_probs, token_ids, num_nodes - 1, root)
        return (context, _Grown(built.tokens, built.parents, built.depths), (log_probs, token_ids, num_nodes - 1))
    if shape not in SHAPES:
        raise ValueError(f"shape: got {shape!r}; expected one of {', '.join(SHAPES)}")
    choose_parent: Callable[[int], int] = (lambda i: i - 1) if shape == "chain" else (lambda i: int(rng.integers(0, i)))
    return context, _grow(rng, continuation, root, num_nodes, choose_parent), None


def _continuation(weights: mla_model.Weights, settings: dict[str, Any], tokens: list[int], length: int) -> list[int]:
    """The model's own greedy tokens."""
    start = len(tokens)
    for _ in range(length):
        logits = mla_model.prefill(weights, settings, np.array(tokens)).logits
        tokens = [*tokens, int(logits[-1].argmax())]
    return tokens[start:]


def _grow(
    rng: np.random.Generator, continuation: list[int], root: int, num_nodes: int, choose_parent: Callable[[int], int]
) -> _Grown:
    """A tree in which the first child on the spine follows the model and every other token differs from it."""
    tokens, parents, depths, spine = [root], [-1], [0], [0]
    for i in range(1, num_nodes):
        parent = choose_parent(i)
        wanted = continuation[len(spine) - 1] if len(spine) <= len(continuation) and parent == spine[-1] else None
        siblings = {tokens[j] for j in range(1, i) if parents[j] == parent} | set(
            continuation[depths[parent] : depths[parent] + 1]
        )
        if wanted is not None:
            spine.append(i)
            tokens.append(wanted)
        else:
            tokens.append(int(rng.choice([token for token in range(VOCAB) if token not in siblings])))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return _Grown(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(depths, np.int32))


def _marginals(rng: np.random.Generator, continuation: list[int], rows: int, ranks: int) -> tuple[Array, Array]:
    """Made-up marginals that rank the model's own token first or second while its continuation lasts."""
    logits = -np.sort(-2 * rng.standard_normal((rows, ranks)), axis=1)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    token_ids = np.stack([rng.permutation(VOCAB)[:ranks] for _ in range(rows)]).astype(np.int32)
    for row, token in zip(token_ids, continuation, strict=False):
        row[row == token] = next(t for t in range(VOCAB) if t not in row and t != token)
        row[rng.integers(0, 2)] = token
    return log_probs.astype(np.float32), token_ids


def _drafters(marginals: list[_Marginals | None]) -> Drafter | None:
    present = [m for m in marginals if m is not None]
    if not present:
        return None
    return Drafter(
        log_probs=np.stack([log_probs for log_probs, _, _ in present]),
        token_ids=np.stack([token_ids for _, token_ids, _ in present]),
        budget=np.array([budget for _, _, budget in present], np.int32),
    )


def _slots(rng: np.random.Generator, lengths: list[int], page_size: int) -> tuple[Array, int]:
    """Whole pages in random order for every request, a quarter of the pool left unused."""
    pages = [-(-length // page_size) for length in lengths]
    num_pages = sum(pages) + sum(pages) // 4 + 1
    order = rng.permutation(num_pages)
    slots = []
    for length, first, count in zip(lengths, np.cumsum([0, *pages]), pages, strict=False):
        own = order[first : first + count, None] * page_size + np.arange(page_size)
        slots.append(own.ravel()[:length])
    return np.concatenate(slots).astype(np.int64), num_pages * page_size


def _layers(bundle: Bundle, weights: mla_model.Weights, settings: dict[str, Any]) -> tuple[Layer, ...]:
    """Queries and rows of every layer, rounded to bfloat16 where the engine would store them."""
    model = mla_model.Model(weights, settings)
    request, tree = bundle.request, bundle.tree
    kv = [np.zeros((int(request.kv_indptr[-1]), bundle.width)) for _ in range(model.num_layers)]
    for b in range(bundle.batch):
        prefix = int(request.prefix_len[b])
        if prefix:
            rows = mla_model.prefill(weights, settings, bundle.context.tokens[bundle.prefix(b)]).kv
            for layer in range(model.num_layers):
                kv[layer][bundle.keys(b)][:prefix] = rows[layer]
    inputs = mla_model.Inputs(tree.tokens, tree.depths, request.prefix_len, request.num_nodes, np.zeros(0), kv)
    x = model.before_attention(0, model.embed(tree.tokens))
    positions = mla_model.node_positions(inputs)
    kv[0][mla_model.node_keys(inputs)] = model.rows(0, x, positions)
    inputs = inputs._replace(q=_rounded(model.queries(0, x, positions)), kv=[_rounded(rows) for rows in kv])
    captured = []

    def attend(_layer: int, q: Array, kv: Array) -> Array:
        captured.append(Layer(q=to_bfloat16(q), kv=to_bfloat16(kv)))
        out, _ = verify_attn(
            bundle.pad_nodes(q),
            bundle.pad_keys(kv, 0.0),
            sm_scale=bundle.sm_scale,
            mask=bundle.mask(),
            d_latent=bundle.d_latent,
        )
        return bundle.unpad_nodes(out)

    mla_model.verify_forward(weights, settings, inputs, attend, _rounded)
    return tuple(captured)


def _rounded(values: Array) -> Array:
    return from_bfloat16(to_bfloat16(values.astype(np.float32)))
