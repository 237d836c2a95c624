"""Make the six bundles of fixtures/bundles: `nox -s bundle -- make`.

Five come from the tiny trained model, one from seeded weights with the geometry of Kimi K2.6. A round of
tree verification is drafted on held-out text, captured from the transformers model, completed by the
oracle, and kept if it is what the bundle's plan below asks for; rounds that are not are counted by
reason and printed. The files are a function of the weights, the corpus, the library versions and the
date given: a second run writes the same bytes.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from kdtree_engine import bundle, capture
from oracle.tree_accept import tree_accept
from oracle.tree_build import tree_build
from phases import bundles, exactness
from phases.seeded_weights import seeded_weights
from phases.tiny_model import corpus, decode, drafter, model, ngram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kdtree_engine.bundle import Array, Bundle
    from kdtree_engine.capture import VerifyStep

FIXTURES = Path(__file__).parent.parent / "fixtures"
SEED = 20260601
MAX_ROUNDS, MAX_BATCHES = 2000, 50
# The last tokens before a tree are the model's own, as in a running decode.
GENERATED = 8
NGRAM_TEXT_BYTES = 6_000_000

# One layer with the attention geometry of Kimi K2.6; hidden size, ranks and MLP are outside the kernel.
# Gain 2 on the query gives scores a standard deviation of 4, about as peaked as a trained layer.
KIMI_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": corpus.VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 192,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "seeded_gain": {"q_b_proj": 2.0},
}


@dataclass(frozen=True)
class Plan:
    """What one request of a bundle must be.

    Attributes:
        prefix: P, tokens in the cache.
        budget: tree nodes without the root.
        drafter: "dflash", "ngram" or "self".
        rank: K, candidates for each depth.
        path: shortest and longest accepted path, the root counted.
        sibling: whether a node other than its parent's best child must be accepted.
    """

    prefix: int
    budget: int
    drafter: str
    rank: int
    path: tuple[int, int]
    sibling: bool = False


@dataclass(frozen=True)
class Set:
    """One bundle: its requests, where their keys lie, and the model behind it."""

    name: str
    plans: tuple[Plan, ...]
    page_size: int = 1
    model: str = "tiny_model"
    # Rounds with a smaller gap between two logits are passed over before the costly computation of D;
    # twice the bfloat16 budget is rarely below it.
    least_margin: float = 0.2


SETS = (
    Set("chain_n8", (Plan(128, 7, "dflash", 1, (3, 3)),)),
    Set("dflash_tree_n17", (Plan(300, 16, "dflash", 16, (3, 5), sibling=True),)),
    Set("ngram_tree_n33", (Plan(300, 32, "ngram", 32, (5, 12)),)),
    Set(
        "ragged_page64",
        (
            Plan(0, 0, "dflash", 32, (1, 1)),
            Plan(1, 7, "dflash", 32, (1, 1)),
            Plan(63, 16, "dflash", 32, (2, 4)),
            Plan(257, 32, "dflash", 32, (3, 7), sibling=True),
        ),
        page_size=64,
    ),
    Set("long_prefix_n17", (Plan(1500, 16, "dflash", 16, (3, 6)),)),
    Set("kimi_geometry_n17", (Plan(512, 16, "self", 16, (2, 5)),), model="seeded", least_margin=0.04),
)


@dataclass(frozen=True)
class Round:
    """A captured round with the drafter's rows [L, K] and where its text is from."""

    step: VerifyStep
    log_probs: Array
    token_ids: Array
    budget: int
    source: dict[str, object]


class Lab:
    """A model, its drafters and the held-out text."""

    def __init__(self, name: str, weights: Path, text_folder: Path, date: str) -> None:
        self.name = name
        self.config: dict[str, Any] | None = None
        if name == "seeded":
            self.config = KIMI_CONFIG
            self.model = seeded_model(KIMI_CONFIG, SEED)
        else:
            self.model = model.build(weights / "target.safetensors", attention="eager")
            self.features = model.Features(self.model)
            self.student = drafter.build(weights / "drafter.safetensors", weights / "drafter.json")
        text = corpus.load(text_folder)
        train = text.train[text.train < 256][:NGRAM_TEXT_BYTES].astype(np.uint8).tobytes()
        self.ngram = ngram.Ngram(train)
        self.provenance = {
            "generator": "phases.make_bundles",
            "date": date,
            "corpus": f"standard library of Python {platform.python_version()}, held-out files",
            "corpus_sha256": text.description["sha256"],
        }
        self.files = [
            (name, [corpus.BOS, *data])
            for name in corpus.files(text_folder)
            if corpus.is_held_out(name) and (data := corpus.text(text_folder / name))
        ]

    def texts(self, plan: Plan, seed: int) -> Iterator[tuple[list[int], dict[str, object]]]:
        """Yield token lists of P + 1 tokens, prefix and root, whose tail the model wrote itself."""
        rng = np.random.default_rng(seed)
        generated = GENERATED if plan.prefix > GENERATED else 0
        wanted = plan.prefix + 1 - generated
        while True:
            name, tokens = self.files[rng.integers(len(self.files))]
            # Without a prefix the root is the token that every file begins with.
            offset = int(rng.integers(len(tokens))) if plan.prefix else 0
            prompt = tokens[offset : offset + wanted]
            if len(prompt) == wanted:
                written = decode.greedy(self.model, prompt, generated)
                yield prompt + written, {"file": name, "offset": offset, "generated": generated}

    def draft(self, plan: Plan, tokens: list[int], seed: int) -> tuple[Array, Array]:
        """Return the drafter's best `rank` log-probabilities and tokens for each depth, both [L, K]."""
        *prefix, root = tokens
        if plan.drafter == "ngram":
            rows = self.ngram.draft(bytes(token for token in tokens if token < 256), 15)
        elif plan.drafter == "dflash":
            if prefix:
                self.model(input_ids=torch.tensor([prefix]), use_cache=False)
                states = self.features.take()[0]
            else:
                states = torch.zeros(0, 2 * self.model.config.hidden_size)
            embedding = self.model.model.embed_tokens.weight
            rows = self.student.draft(states, root, len(prefix), embedding).numpy()
        else:
            rows = self._own_marginals(tokens, seed)
        return decode.best_of(rows, plan.rank)

    def _own_marginals(self, tokens: list[int], seed: int) -> Array:
        """The model's own logits along its greedy continuation, with noise so that it errs."""
        path = tokens + decode.greedy(self.model, tokens, 7)
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([path[:-1]]), use_cache=False).logits
        noisy = logits[0, -7:].double().numpy()
        noisy += np.random.default_rng(seed).normal(size=noisy.shape) * 0.5 * noisy.std()
        shifted = noisy - noisy.max(axis=1, keepdims=True)
        law: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return law

    def round(self, plan: Plan, tokens: list[int], source: dict[str, object], seed: int) -> Round:
        """Draft a tree and verify it."""
        log_probs, ids = self.draft(plan, tokens, seed)
        *prefix, root = tokens
        tree = tree_build(log_probs, ids, plan.budget, root)
        step = capture.verify_step(self.model, prefix, tree.tokens.tolist(), tree.parents.tolist())
        return Round(step, log_probs, ids, plan.budget, source)


def seeded_model(config: dict[str, Any], seed: int) -> Any:
    """Build the transformers model of a seeded bundle, float32."""
    settings = DeepseekV3Config(**{k: v for k, v in config.items() if k != "seeded_gain"})
    settings._attn_implementation = "eager"
    built = DeepseekV3ForCausalLM(settings)
    weights = {k: torch.from_numpy(v) for k, v in seeded_weights(config, seed).items()}
    built.load_state_dict(weights)
    return built.eval().requires_grad_(False)


def shape_problem(plan: Plan, step: VerifyStep) -> str | None:
    """Say why the round is not what the plan asks for, by the model's own logits."""
    tokens, parents = step.tokens.tolist(), step.parents.tolist()
    if len(tokens) != plan.budget + 1:
        return "tree smaller than the budget"
    path = tree_accept(tokens, parents, step.logits.argmax(-1).tolist()).path
    shortest, longest = plan.path
    if not shortest <= len(path) <= longest:
        return f"path shorter than {shortest}" if len(path) < shortest else f"path longer than {longest}"
    best_child = {parent: node for node, parent in reversed(list(enumerate(parents)))}
    if plan.sibling and all(best_child[parents[node]] == node for node in path[1:]):
        return "only best children accepted"
    return None


def least_margin(step: VerifyStep) -> float:
    """Return the smallest gap between the best two of the model's own logits."""
    best_two = np.sort(step.logits, axis=-1)[:, -2:]
    return float((best_two[:, 1] - best_two[:, 0]).min())


def put_together(entry: Set, lab: Lab, rounds: Sequence[Round]) -> Bundle:
    """Make one bundle of the rounds, without the oracle's part."""
    rng = np.random.default_rng(SEED)
    slots, num_slots = scattered_slots(
        [round.step.prefix.size + round.step.tokens.size for round in rounds], entry.page_size, rng
    )
    return capture.to_bundle(
        [round.step for round in rounds],
        name=entry.name,
        page_size=entry.page_size,
        num_slots=num_slots,
        kv_indices=slots,
        drafter=bundle.Drafter(
            log_probs=np.stack([round.log_probs for round in rounds]),
            token_ids=np.stack([round.token_ids for round in rounds]),
            budget=np.array([round.budget for round in rounds], np.int32),
        ),
        model=entry.model,
        model_config=lab.config,
        model_seed=SEED if lab.config else None,
        provenance=lab.provenance | {"texts": [round.source for round in rounds]},
    )


def scattered_slots(num_keys: Sequence[int], page_size: int, rng: np.random.Generator) -> tuple[Array, int]:
    """Give every request pages anywhere in a pool with a quarter of its pages unused.

    Returns the slots int64 [K], requests one after the other, and the size of the pool.
    """
    num_pages = [-(-count // page_size) for count in num_keys]
    pool_pages = sum(num_pages) + -(-sum(num_pages) // 4)
    pages = np.split(rng.permutation(pool_pages)[: sum(num_pages)], np.cumsum(num_pages)[:-1])
    within = np.arange(page_size)
    slots = [(page[:, None] * page_size + within).ravel()[:count] for page, count in zip(pages, num_keys, strict=True)]
    return np.concatenate(slots).astype(np.int64), pool_pages * page_size


def counted(reason: str) -> str:
    """Leave the figures out of a reason, so that equal ones count as one."""
    return re.sub(r" \(.*\)|\b[\d.]+(e-\d+)?\b ?", "", reason).split(";")[0].strip()


def problems_of(made: Bundle) -> list[str]:
    """Say why a completed bundle is not to be shipped.

    More is asked than of any bundle: every node is decided for a bfloat16 kernel too, and bfloat16
    storage of the inputs leaves the model's own token on the accepted path.
    """
    reasons = bundles.problems(made)
    assert made.expected is not None
    assert made.witness is not None
    weights, attend = exactness.load_model(made), exactness.oracle_attend(made)
    margin = exactness.top_two(exactness.forward(made, weights, attend, "bfloat16"))[2]
    if undecided := int((margin <= 2 * made.expected.logit_budget_bfloat16).sum()):
        reasons.append(f"{undecided} undecided nodes in bfloat16")
    changed = made.witness.logits.argmax(-1) != made.expected.argmax
    starts = np.repeat(made.request.qo_indptr[:-1], made.expected.accepted_len)
    if changed[starts + made.expected.accepted_path].any():
        reasons.append("bfloat16 storage changes an accepted token")
    return reasons


def find_round(entry: Set, lab: Lab, plan: Plan, seed: int, rejected: Counter[str], tick: Callable[[], None]) -> Round:
    """Try rounds until one is what the plan asks for and its margins make it token-exact-testable."""
    for attempt, (tokens, source) in enumerate(lab.texts(plan, seed)):
        if attempt == MAX_ROUNDS:
            break
        tick()
        found = lab.round(plan, tokens, source, seed=seed + attempt)
        problem = shape_problem(plan, found.step)
        if problem is None and least_margin(found.step) < entry.least_margin:
            problem = f"a margin below {entry.least_margin:g}"
        if problem is None:
            # What a walk must show is asked of the whole bundle; of a request the plan sees to it.
            alone = bundles.complete(put_together(entry, lab, [found]))
            reasons = [text for text in problems_of(alone) if not text.startswith("no node")]
            problem = counted(reasons[0]) if reasons else None
        if problem is None:
            return found
        rejected[problem] += 1
    raise SystemExit(f"{entry.name}: none of {MAX_ROUNDS} rounds fits {plan}; loosen the plan")


def make(entry: Set, lab: Lab, out: Path, progress: Progress) -> tuple[Bundle, Counter[str]]:
    """Make one bundle and write it; return it with the counts of rejected rounds."""
    task = progress.add_task(entry.name, total=None)
    rejected: Counter[str] = Counter()

    def find(index: int, trial: int) -> Round:
        seed = SEED + 1000 * trial + index
        return find_round(entry, lab, entry.plans[index], seed, rejected, lambda: progress.advance(task))

    rounds = [find(index, 0) for index in range(len(entry.plans))]
    for trial in range(1, MAX_BATCHES):
        made = bundles.complete(put_together(entry, lab, rounds))
        problems = problems_of(made)
        if not problems:
            bundle.write(out / f"{entry.name}.h5", made)
            progress.update(task, total=progress.tasks[task].completed)
            return made, rejected
        # The budget D of a batch is the largest of its requests: the one with the least margin goes.
        rejected[f"in the batch: {counted(problems[0])}"] += 1
        weakest = int(np.argmin([least_margin(round.step) for round in rounds]))
        rounds[weakest] = find(weakest, trial)
    raise SystemExit(f"{entry.name}: none of {MAX_BATCHES} batches is testable; loosen its plans")


def summary(made: Bundle, rejected: Counter[str], size: int) -> str:
    """Return two lines on one bundle: what it is, and which rounds were passed over."""
    assert made.expected is not None
    margin, budget = made.expected.margin.min(), made.expected.logit_budget
    requests = ", ".join(
        f"P {made.request.prefix_len[b]} n {made.request.num_nodes[b]} "
        f"path {made.expected.accepted_path[made.accepted(b)].tolist()}"
        for b in range(made.batch)
    )
    reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.most_common())
    return (
        f"{made.name}: {requests}; min margin {margin:.3g}, D {budget:.2g}, "
        f"ratio {margin / (2 * budget):.3g}, {size / 2**20:.2f} MiB\n"
        f"  rejected rounds: {rejected.total()}{f' ({reasons})' if reasons else ''}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Make the bundles named on the command line, or all six."""
    names = [entry.name for entry in SETS]
    parser = argparse.ArgumentParser(prog="make_bundles", description="Make the shipped bundles.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default all")
    parser.add_argument("--out", type=Path, default=FIXTURES / "bundles", help="folder to write to")
    parser.add_argument("--weights", type=Path, default=FIXTURES / "tiny_model")
    parser.add_argument("--corpus", type=Path, default=corpus.standard_library())
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parser.add_argument("--date", default=today, help="goes into the provenance (default today, UTC)")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(names):
        parser.error(f"no bundle {', '.join(sorted(unknown))}; expected of {', '.join(names)}")
    args.out.mkdir(parents=True, exist_ok=True)
    # One thread: sums in one order, so the same bytes on every run.
    torch.set_num_threads(1)

    console = Console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed} rounds"))
    labs: dict[str, Lab] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for entry in SETS:
            if args.names and entry.name not in args.names:
                continue
            if entry.model not in labs:
                labs[entry.model] = Lab(entry.model, args.weights, args.corpus, args.date)
            made, rejected = make(entry, labs[entry.model], args.out, progress)
            size = (args.out / f"{entry.name}.h5").stat().st_size
            console.print(summary(made, rejected, size), soft_wrap=True, highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
