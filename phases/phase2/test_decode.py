"""Phase 2, T3: a text decoded by draft trees is the text of plain decoding, greedy and drawn.

Greedy texts are compared with the oracle's, token by token in float64. At a token whose two best logits lie closer than
twice the logit budget, rounding may choose the other one; a line says so, and the rest of the text is compared with
what float64 makes of the text so far. Drawn tokens depend on a uniform a position, so that texts can be compared too;
that their law is the target's is a matter of statistics.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from kdtree_engine import bundle as bundles
from kdtree_engine import tree_accept
from kdtree_engine.decode import Decoder, DflashDrafter, MlaModel, NgramDrafter, arrays_for, read_weights
from kdtree_engine.decode.loop import LOGIT_BUDGET
from oracle import mla_model
from oracle.decode import Text, greedy, teacher_forced
from oracle.tree_accept import law
from phases.conftest import BUNDLES, ROOT
from phases.exactness import round_to_bfloat16

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kdtree_engine.decode import Round
    from phases.places import Place

    Array = npt.NDArray[Any]
    Evidence = Callable[..., None]

TINY = ROOT / "fixtures" / "tiny_model"
COUNT = 96
PROMPTS = [
    "def ",
    "import os\n",
    "x",
    "    return",
    "class Reader:\n",
    "# -*- coding",
    "for key, value in sorted(items.items()):\n",
    "def test_empty_string(self):\n        ",
    "    def __init__(self, name, parent=None):\n",
    "if __name__ == '__main__':\n    ",
    "        raise ValueError('expected a ",
    "from collections import ",
]
# Draft budgets below the root with 16 candidates a depth, and chains.
TREES = {"1": (1, 16), "7": (7, 16), "16": (16, 16), "32": (32, 16), "64": (64, 16), "chain": (7, 1)}
DRAFTERS = ("dflash", "ngram")


@cache
def oracle_model() -> mla_model.Model:
    return mla_model.Model(*read_weights(TINY, "target.safetensors", "config.json"))


@cache
def oracle_text(prompt: str) -> Text:
    return greedy(oracle_model(), list(prompt.encode()), COUNT, round_to_bfloat16)


@cache
def model(kind: Literal["host", "cuda"]) -> MlaModel:
    return MlaModel(*read_weights(TINY, "target.safetensors", "config.json"), arrays_for(kind))


@cache
def drafter(kind: Literal["host", "cuda"], name: str) -> Any:
    arrays = arrays_for(kind)
    if name == "dflash":
        return DflashDrafter(*read_weights(TINY, "drafter.safetensors", "drafter.json"), arrays)
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "oracle").glob("*.py")))
    return NgramDrafter(text, model(kind).vocab_size, arrays)


def decode(decoder: Decoder, prompts: list[str], count: int) -> list[list[Round]]:
    """Each request's rounds."""
    rounds: list[list[Round]] = [[] for _ in prompts]
    for done in decoder.generate([list(prompt.encode()) for prompt in prompts], count):
        rounds[done.request].append(done)
    return rounds


def tokens(rounds: list[Round]) -> list[int]:
    return [token for done in rounds for token in done.new]


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    assert len(ours) == len(theirs)
    return next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)


def test_logit_budget_is_the_bundles() -> None:
    captured = [bundles.read(path) for path in bundles.find(BUNDLES)]
    budgets = [each.expected.logit_budget_bfloat16 for each in captured if each.model == "tiny_model" and each.expected]
    assert pytest.approx(max(budgets), rel=1e-3) == LOGIT_BUDGET


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_the_oracles(place: Place, name: str, tree: str, evidence: Evidence) -> None:
    budget, width = TREES[tree]
    decoder = Decoder(model(place.kind), drafter(place.kind, name), budget=budget, width=width, library=place.library)
    turned, accepted, rounds = 0, 0, 0
    for prompt, done in zip(PROMPTS, decode(decoder, PROMPTS, COUNT), strict=True):
        found, right = tokens(done), oracle_text(prompt)
        accepted += sum(len(each.path) for each in done[1:])
        rounds += len(done) - 1
        where = first_difference(found, right.tokens)
        if where is None:
            continue
        second, first = np.sort(right.logits[where])[-2:]
        print(f"{prompt!r}: differs from token {where} on, where the two best logits are {first - second:.3g} apart")
        assert first - second < 2 * LOGIT_BUDGET
        logits = teacher_forced(oracle_model(), list(prompt.encode()), found, round_to_bfloat16)
        behind = logits.max(-1) - logits[np.arange(COUNT), found]
        turned += int(np.count_nonzero(behind))
        assert behind.max() < 2 * LOGIT_BUDGET
    evidence(drafter=name, tree=tree, rounds=rounds, tokens_a_round=accepted / rounds, turned=turned)
    # Rounding turns next to nothing, and drafting is not idle.
    assert turned <= 0.01 * COUNT * len(PROMPTS)
    assert accepted / rounds > 1.3


def test_what_is_in_free_slots_does_not_matter(place: Place, evidence: Evidence) -> None:
    """NaN in every slot that holds no accepted token, before every round; a long prompt and one of one token."""
    arrays = arrays_for(place.kind)
    decoder = Decoder(model(place.kind), drafter(place.kind, "dflash"), budget=16, library=place.library)
    prompts = [PROMPTS[0], "x", "import os\n" * 30]
    texts: list[list[int]] = [[] for _ in prompts]
    for done in decoder.generate([list(prompt.encode()) for prompt in prompts], 24):
        texts[done.request] += done.new
        if done.request == 0:  # the round is over for all of them
            poison = arrays.bfloat16(arrays.array(np.full((), np.nan, np.float32)))
            decoder._pools[:, arrays.array(decoder._free)] = poison
    for prompt, text in zip(prompts, texts, strict=True):
        logits = teacher_forced(oracle_model(), list(prompt.encode()), text, round_to_bfloat16)
        assert (logits.max(-1) - logits[np.arange(24), text]).max() < 0.01
    evidence(kernel="kv_compact")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", DRAFTERS)
def test_drawn_text_is_that_of_plain_decoding(place: Place, name: str, seed: int, evidence: Evidence) -> None:
    """Drawn by the oracle too: every token against the law that float64 gives after those before it."""
    decoder = Decoder(
        model(place.kind), drafter(place.kind, name), budget=16, temperature=0.8, seed=seed, library=place.library
    )
    plain = Decoder(model(place.kind), temperature=0.8, seed=seed, library=place.library)
    prompts, count = PROMPTS[::2], COUNT // 2
    same, as_float64 = 0, 0
    pairs = zip(prompts, decode(decoder, prompts, count), decode(plain, prompts, count), strict=True)
    for index, (prompt, done, right) in enumerate(pairs):
        found = tokens(done)
        where = first_difference(found, tokens(right))
        same += where is None
        if where is not None:
            margin = [margin for each in right for margin in each.margins][where]
            print(f"{prompt!r}: differs from token {where} on, whose uniform is {margin:.3g} from another token's")
            assert margin < decoder.undecided
        given = list(prompt.encode())
        uniforms = np.random.default_rng([seed, index]).random(1000, np.float32)[len(given) :]
        logits = teacher_forced(oracle_model(), given, found, round_to_bfloat16)
        for token, uniform, row in zip(found, uniforms, logits, strict=False):
            edges = np.insert(np.cumsum(law(row, 0.8)), 0, 0.0)
            assert edges[token] - decoder.undecided < uniform < edges[token + 1] + decoder.undecided
            as_float64 += bool(edges[token] <= uniform < edges[token + 1])
    evidence(drafter=name, seed=seed, same=same, as_float64=as_float64 / (count * len(prompts)))
    assert same >= 0.6 * len(prompts)
    assert as_float64 >= 0.99 * count * len(prompts)


class Law:
    """A chi-square test of counts against probabilities, whose threshold and power are simulated.

    Categories that expect fewer than eight are taken together.
    """

    def __init__(self, probabilities: Array, number: int) -> None:
        self.number = number
        self._large = probabilities * number >= 8
        self.expected = self._pooled(probabilities)
        self._rng = np.random.default_rng(1)
        # One in a thousand samples of the law itself lies above.
        self.threshold = float(np.quantile(self.statistics(self.expected), 0.999))

    def _pooled(self, values: Array) -> Array:
        pooled = np.append(values[self._large], values[~self._large].sum())
        return pooled if pooled[-1] > 0 else pooled[:-1]

    def statistic(self, counts: Array) -> Any:
        wanted = self.number * self.expected
        return ((counts - wanted) ** 2 / wanted).sum(-1)

    def statistics(self, probabilities: Array) -> Array:
        """Of 20,000 samples of a law over the pooled categories."""
        return np.asarray(self.statistic(self._rng.multinomial(self.number, probabilities, 20_000)))

    def power(self, share: float) -> float:
        """How often the law is refused where a share of draws takes the most probable category instead."""
        peak = np.eye(len(self.expected))[self.expected.argmax()]
        other = (1 - share) * self.expected + share * peak
        return float((self.statistics(other / other.sum()) > self.threshold).mean())

    def check(self, samples: Array) -> dict[str, float]:
        """Figures of samples that follow the law."""
        counts = np.bincount(samples, minlength=len(self._large))
        found = counts[~self._large].sum() if self.expected.size > self._large.sum() else 0
        assert found or not counts[~self._large].sum(), "something impossible was drawn"
        statistic = float(self.statistic(np.append(counts[self._large], found)[: len(self.expected)]))
        assert statistic <= self.threshold
        return {"chi_square": statistic, "threshold": self.threshold, "categories": len(self.expected)}


def test_law_of_the_next_tokens(place: Place, evidence: Evidence) -> None:
    """Texts of two drawn tokens, the second from a tree: the law of each is the target's.

    512 texts: a decoder that takes the most probable token in one of four draws instead is refused in 95 of 100 cases.
    """
    number, prompt, temperature = 512, "def ", 1.0
    decoder = Decoder(
        model(place.kind),
        drafter(place.kind, "dflash"),
        budget=7,
        width=4,
        temperature=temperature,
        seed=7,
        library=place.library,
    )
    texts = np.array([tokens(rounds) for rounds in decode(decoder, [prompt] * number, 2)])
    given = list(prompt.encode())
    first = law(teacher_forced(oracle_model(), given, [0], round_to_bfloat16)[0], temperature)
    second = np.zeros_like(first)
    for token in np.flatnonzero(first > 1e-7):
        logits = teacher_forced(oracle_model(), [*given, int(token)], [0], round_to_bfloat16)[0]
        second += first[token] * law(logits, temperature)
    for position, probabilities in enumerate((first, second / second.sum())):
        judge = Law(probabilities, number)
        power = judge.power(0.25)
        figures = judge.check(texts[:, position])
        print(f"token {position}: {figures}, power {power:.4f}")
        evidence(kernel="tree_accept", position=position, power=power, **figures)
        assert power >= 0.95


def test_law_with_an_impossible_sibling(place: Place, evidence: Evidence) -> None:
    """A root with three drafted children, the second of which the target never says, and their own laws.

    6,000 trees: 5 of 100 draws that take the most probable pair instead are noticed in 99 of 100 cases.
    """
    number, vocab_size = 6000, 6
    rng = np.random.default_rng(3)
    logits = np.array(
        [
            [0.3, -np.inf, 1.1, 0.2, -0.5, -np.inf],
            [1.0, 0.0, -np.inf, 0.5, 0.5, 0.1],
            [0.0, 1.0, 2.0, -1.0, 0.3, 0.4],
            [-np.inf, 0.7, 0.7, 0.7, -np.inf, 0.0],
        ],
        np.float32,
    )
    shape = (number, 4)
    out = tree_accept(
        place.strided(np.broadcast_to(np.array([9, 0, 1, 2], np.int32), shape).copy()),
        parents=place.strided(np.broadcast_to(np.array([-1, 0, 0, 0], np.int32), shape).copy()),
        logits=place.strided(np.broadcast_to(logits, (*shape, vocab_size)).copy()),
        uniforms=place.strided(rng.random(shape, np.float32)),
        library=place.library,
    )
    path, lengths, bonus = (place.array(tensor) for tensor in (out.path, out.path_len, out.bonus))
    children = path[:, 1]
    assert not (children == 2).any()
    # Pairs of the first and second token; a text that left the tree has no second.
    firsts = np.where(lengths == 2, children - 1, bonus)
    seconds = np.where(lengths == 2, bonus, vocab_size)
    root, (left, _, right) = law(logits[0], 1.0), (law(row, 1.0) for row in logits[1:])
    pairs = np.zeros((vocab_size, vocab_size + 1))
    pairs[:, vocab_size] = root
    pairs[[0, 2], vocab_size] = 0
    pairs[0, :vocab_size], pairs[2, :vocab_size] = root[0] * left, root[2] * right
    judge = Law(pairs.reshape(-1), number)
    power = judge.power(0.05)
    figures = judge.check(firsts * (vocab_size + 1) + seconds)
    print(f"{figures}, power {power:.4f}")
    evidence(kernel="tree_accept", power=power, **figures)
    assert power >= 0.99
