"""Times verify steps inside SGLang on this machine's GPU, by its kernel and by ours: python -m benchmarks.sglang_step

A step is that of SGLang's own backend class with its own batch and pools: a tree of 17 nodes for each request, the
layers of a model one after the other in one CUDA graph, each with a pool of its own. Times are medians of replays in
turn, so that the clock treats all alike, divided by the number of layers:

    SGLang            the parent class
    off, serve        ours in its modes; both kernels are in the graph, one of them finds its requests empty
    shadow            both run, and are compared

Outputs are compared with float64 first. Needs what `nox -s phase3` installs, and a GPU's torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kdtree_engine import __version__, evidence
from kdtree_engine.ops.verify_attn_paged import OUT_ROW_REL_L2
from phases.phase3 import stand_ins

if TYPE_CHECKING:
    from phases.phase3.graph import Graph

CONTEXTS = (1024, 8192, 32768, 131072)
MODES = ("off", "serve", "shadow")


def times(graphs: dict[str, Graph], replays: int) -> dict[str, dict[str, float]]:
    """Microseconds a layer, by name of the graph, in turn."""
    from kdtree_engine.sglang_backend import set_mode

    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, graph in graphs.items():
            if name in MODES:
                set_mode(name)
            graph.prepare()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.graph.replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e3 / graph.world.step.layers)
    return {
        name: {
            "us": round(statistics.median(each), 2),
            "spread": round((max(each) - min(each)) / statistics.median(each), 4),
        }
        for name, each in found.items()
    }


def point(context: int, batch: int, heads: int, nodes: int, layers: int, replays: int) -> dict[str, Any]:
    """All of them at one context."""
    from kdtree_engine.sglang_backend import parity
    from phases.phase3.graph import Graph
    from phases.phase3.world import Step, World

    state = parity.shared()
    state.serve_share, state.shadow_share = 0.0, 1.0
    ours, theirs = World.both(Step((context,) * batch, nodes=nodes, heads=heads, layers=layers), "cuda")
    answer = ours.answer()
    graph = Graph(ours)
    graphs = {"SGLang": Graph(theirs), **dict.fromkeys(MODES, graph)}
    parity.set_mode("serve")
    out = graph.replay().double().cpu().numpy().reshape(answer.shape)
    row = float((np.linalg.norm(out - answer, axis=-1) / np.linalg.norm(answer, axis=-1)).max())
    figures = times(graphs, replays)
    ours.settled()
    return {
        "context": context,
        "row_rel_l2": row,
        "right": row <= OUT_ROW_REL_L2 and not state.counters["breaches"],
        **figures,
        "serve_over_sglang": round(figures["SGLang"]["us"] / figures["serve"]["us"], 2),
    }


def main() -> int:
    """Run the command; 0 when every timed output was right."""
    parser = argparse.ArgumentParser(prog="sglang_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--nodes", type=int, default=17)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--json", type=Path, help="write the record there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device; this benchmark times SGLang on a GPU", file=sys.stderr)
        return 1
    stand_ins.install()
    import sglang

    shape = {name: getattr(arguments, name) for name in ("batch", "heads", "nodes", "layers")}
    points = []
    for context in arguments.contexts:
        points.append(point(context, **shape, replays=arguments.replays))
        row = points[-1]
        words = ", ".join(f"{name} {row[name]['us']:.1f} us" for name in ("SGLang", *MODES))
        print(f"{context:>7} keys: {words}; SGLang / serve {row['serve_over_sglang']}", flush=True)
    record = {
        "schema": 1,
        "created": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "kernels": evidence.digests(evidence.checkout(Path(__file__).parent), "phase3", "cuda")["kernels"],
        "versions": {"kdtree_engine": __version__, "sglang": sglang.__version__, "torch": torch.__version__},
        "shape": shape,
        "points": points,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row["right"] for row in points) else 1


if __name__ == "__main__":
    sys.exit(main())
