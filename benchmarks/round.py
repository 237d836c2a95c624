"""Times tree_build, tree_accept and kv_compact on this machine's GPU: python -m benchmarks.round --help

A round is that of a server: 16 requests, trees of 64 drafts below the root from 8 depths of 16 candidates, the target
tokens given, and the accepted rows of 61 layers of a latent cache in bfloat16 moved. Every set of inputs has random
trees of its own and paths as long as a drafter that is right seven times out of ten makes them; the sets are captured
into one CUDA graph and the time of a round is the median replay divided by their number. Outputs are compared with
the oracle first. A reduction of logits is timed against the read bandwidth that torch's own reductions reach over the
same bytes in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.timed import Timed
from kdtree_engine import __version__, evidence, kv_compact, tree_accept, tree_build
from oracle.tree_accept import compact, tree_accept_batch
from oracle.tree_build import tree_build_batch

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, BUDGET, DEPTH, WIDTH = 16, 64, 8, 16
LAYERS, ROW, POOL_SLOTS = 61, 576, 65_536
ROWS, VOCABULARY = BATCH * (BUDGET + 1), 163_840
RIGHT = 0.7  # how often a node's target is one of its drafted children, where it has any
SETS = 24


class Round:
    """One set of inputs and the three calls over it."""

    def __init__(self, seed: int, pool: torch.Tensor) -> None:
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((BATCH, DEPTH, WIDTH)) * 2
        log_probs = np.sort(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[..., ::-1].astype(np.float32)
        ids = rng.permuted(np.broadcast_to(np.arange(4000), (BATCH, DEPTH, 4000)), axis=-1)[..., :WIDTH]
        self.given: dict[str, Any] = {
            "log_probs": log_probs,
            "token_ids": np.ascontiguousarray(ids),
            "root_tokens": rng.integers(0, 4000, BATCH),
            "seq_lens": rng.integers(0, 4000, BATCH),
        }
        self.trees = tree_build_batch(**self.given, max_nodes=BUDGET + 1)
        tokens, parents = self.trees["tokens"], self.trees["parents"]
        targets = np.full_like(tokens, -5)
        for b, node in np.ndindex(tokens.shape):
            children = np.flatnonzero(parents[b] == node)
            if len(children) and rng.random() < RIGHT:
                targets[b, node] = tokens[b, rng.choice(children)]
        self.accepted = tree_accept_batch(tokens, parents=parents, target_tokens=targets)
        self.slots = rng.permutation(POOL_SLOTS)[:ROWS].reshape(BATCH, BUDGET + 1)
        self.pool = pool
        self.build = partial(tree_build, **cuda(self.given), max_nodes=BUDGET + 1, index_dtype="int64")
        self.tree = self.build()
        links = {name: getattr(self.tree, name) for name in ("retrive_next_token", "retrive_next_sibling")}
        links["num_nodes"] = self.tree.num_nodes
        self.accept = partial(
            tree_accept, self.tree.tokens, **links, target_tokens=torch.from_numpy(targets).cuda(), max_path=DEPTH + 1
        )
        self.acceptance = self.accept()
        self.compact = partial(
            kv_compact,
            pool,
            self.acceptance.path,
            self.acceptance.path_len,
            node_slots=torch.from_numpy(self.slots).cuda(),
            num_nodes=self.tree.num_nodes,
        )

    def problem(self) -> str:
        """What is wrong with the three answers; empty if nothing."""
        for name, right in self.trees.items():
            if not np.array_equal(getattr(self.tree, name).cpu().numpy().astype(right.dtype), right):
                return f"tree_build: {name}"
        length = self.acceptance.path_len.cpu().numpy()
        if not np.array_equal(length, self.accepted["path_len"]):
            return "tree_accept: path_len"
        if not np.array_equal(self.acceptance.path.cpu().numpy(), self.accepted["path"][:, : DEPTH + 1]):
            return "tree_accept: path"
        rows = torch.from_numpy(self.slots.reshape(-1)).cuda()
        before = self.pool[:, rows].view(torch.int16).cpu().numpy()
        moved = self.compact()
        after = self.pool[:, rows].view(torch.int16).cpu().numpy()
        for b, steps in enumerate(self.accepted["path"]):
            numbers = list(range(b * (BUDGET + 1), (b + 1) * (BUDGET + 1)))
            for layer in range(LAYERS):
                right, _ = compact(before[layer], numbers, steps[: length[b]].tolist())
                if not np.array_equal(after[layer][numbers], right[numbers]):
                    return f"kv_compact: request {b}, layer {layer}"
        return "" if not moved.status.any() else "kv_compact: status"

    def __call__(self) -> None:
        self.build(out=self.tree)
        self.accept(out=self.acceptance)
        self.compact()


def cuda(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}


def timed(calls: list[Callable[[], object]], replays: int) -> dict[str, float]:
    """Median microseconds a call and the spread of replays."""
    graph = Timed(calls)
    for _ in range(replays):
        graph.replay()
    median = statistics.median(graph.times)
    return {"us": round(median, 2), "spread": round((max(graph.times) - min(graph.times)) / median, 4)}


def rounds(replays: int) -> dict[str, Any]:
    """The three ops one by one and together."""
    pool = torch.randn(LAYERS, POOL_SLOTS, ROW, device="cuda", dtype=torch.bfloat16)
    sets = [Round(seed, pool) for seed in range(SETS)]
    problem = next((found for found in (each.problem() for each in sets) if found), "")
    lengths = np.concatenate([each.accepted["path_len"] for each in sets])
    return {
        "shape": {"batch": BATCH, "budget": BUDGET, "depth": DEPTH, "width": WIDTH, "layers": LAYERS, "row": ROW},
        "mean_path_len": round(float(lengths.mean()), 3),
        "problem": problem,
        "tree_build": timed([partial(each.build, out=each.tree) for each in sets], replays),
        "tree_accept": timed([partial(each.accept, out=each.acceptance) for each in sets], replays),
        "kv_compact": timed([each.compact for each in sets], replays),
        "together": timed(list(sets), replays),
    }


def reductions(replays: int) -> dict[str, Any]:
    """Targets from logits [1040, 163840] in bfloat16, and the read bandwidth of the run."""
    logits = torch.randn(2, ROWS, VOCABULARY, device="cuda").bfloat16()
    tokens = torch.zeros(BATCH, BUDGET + 1, dtype=torch.int64, device="cuda")
    parents = torch.zeros(BATCH, BUDGET + 1, dtype=torch.int32, device="cuda")
    parents[:, 0] = -1
    uniforms = torch.rand(BATCH, BUDGET + 1, device="cuda")
    size = logits[0].nbytes
    found: dict[str, Any] = {"shape": [ROWS, VOCABULARY], "bytes": size, "problem": ""}

    def accept(half: int, **options: Any) -> Any:
        return tree_accept(tokens, parents=parents, logits=logits[half], **options)

    right = torch.stack([logits[0, row].float().argmax() for row in range(ROWS)])
    top = logits[0].float().amax(-1)
    answer = accept(0).node_targets.reshape(-1)
    if not torch.equal(logits[0].gather(1, answer[:, None])[:, 0].float(), top) or bool((answer > right).any()):
        found["problem"] = "tree_accept: argmax"
    for name, options in (("argmax", {}), ("sample", {"uniforms": uniforms})):
        found[name] = timed([partial(accept, half, **options) for half in (0, 1)], replays)
    found["torch_argmax"] = timed([partial(torch.argmax, logits[half], -1) for half in (0, 1)], replays)
    words = logits.view(torch.int64)
    reads = {
        "sum of int64": timed([partial(torch.sum, words[half]) for half in (0, 1)], replays),
        "amax of float32": timed([partial(torch.amax, logits[half].view(torch.float32)) for half in (0, 1)], replays),
        "amax of bfloat16": timed([partial(torch.amax, logits[half]) for half in (0, 1)], replays),
    }
    fastest = min(reads, key=lambda name: reads[name]["us"])
    best = reads[fastest]["us"]
    found["read"] = {"by": fastest, **reads[fastest], "tbs": round(size / best * 1e-6, 3)}
    for name in ("argmax", "sample", "torch_argmax"):
        found[name] |= {"tbs": round(size / found[name]["us"] * 1e-6, 3), "of_read": round(best / found[name]["us"], 3)}
    return found


def main() -> int:
    """Run the command; 0 when every timed answer was right."""
    parser = argparse.ArgumentParser(prog="round", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the record there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device; this benchmark times kernels on a GPU", file=sys.stderr)
        return 1
    record = {
        "schema": 1,
        "created": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "kernels": evidence.digests(evidence.checkout(Path(__file__).parent), "phase2", "cuda")["kernels"],
        "versions": {"kdtree_engine": __version__, "torch": torch.__version__, "numpy": np.__version__},
        "round": rounds(arguments.replays),
        "targets": reductions(arguments.replays),
    }
    for name in ("tree_build", "tree_accept", "kv_compact", "together"):
        print(f"{name:>14} {record['round'][name]['us']:8.2f} us")
    for name in ("argmax", "sample", "torch_argmax", "read"):
        figures = record["targets"][name]
        print(f"{name:>14} {figures['us']:8.2f} us {figures['tbs']:7.3f} TB/s")
    problems = [record[part]["problem"] for part in ("round", "targets") if record[part]["problem"]]
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
