"""Times the paged verify attention on this machine's GPU: python -m benchmarks.verify_attn_paged --help

Every point is a batch of equal requests with scattered token slots and a random tree each. Inputs are rotated: so many
sets, with their own queries and slots in one pool, that 260 MB are read before one repeats. The calls of all sets are
captured into one CUDA graph, whose replays are timed by events; the time of a call is the median replay divided by
the number of sets. It counts when the outputs of the first set agree with float64.

    floor      max(bytes / 4.49 TB/s, flops / 630 TFLOP/s): the card's read bandwidth and its rate of mma.sync
    practical  what a very good mma.sync kernel could show: the measured time of gathering the rows, or flops at 545
               TFLOP/s, the rate that ldmatrix feeds; both as measured on an H200, for the points below
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.timed import Timed
from kdtree_engine import __version__, evidence
from kdtree_engine import library as find_library
from kdtree_engine.ops.verify_attn_paged import LSE_ABS, OUT_ROW_REL_L2, verify_attn_paged

# (batch, nodes, heads, prefix): practical floor in microseconds, class.
POINTS: dict[tuple[int, int, int, int], tuple[float, str]] = {
    (1, 1, 16, 8192): (5.1, "latency"),
    (1, 1, 128, 65536): (33.5, "medium"),
    (16, 1, 8, 200000): (841.5, "memory"),
    (16, 1, 16, 8192): (38.5, "medium"),
    (16, 1, 128, 8192): (67.0, "medium"),
    (1, 8, 8, 1024): (2.8, "latency"),
    (1, 8, 8, 8192): (5.1, "latency"),
    (1, 8, 8, 65536): (21.2, "small"),
    (1, 8, 64, 65536): (134.0, "medium"),
    (1, 16, 8, 200000): (102.2, "medium"),
    (1, 16, 16, 1024): (2.8, "latency"),
    (1, 16, 64, 8192): (33.5, "medium"),
    (1, 64, 8, 200000): (408.8, "large"),
    (1, 64, 16, 65536): (267.9, "large"),
    (1, 64, 128, 65536): (2143.5, "large"),
    (4, 8, 16, 8192): (16.7, "small"),
    (4, 16, 8, 200000): (408.8, "large"),
    (4, 16, 64, 65536): (1071.8, "large"),
    (4, 64, 128, 8192): (1071.8, "large"),
    (16, 8, 8, 8192): (38.5, "medium"),
    (16, 8, 16, 65536): (535.9, "large"),
    (16, 8, 128, 8192): (535.9, "large"),
    (16, 16, 64, 8192): (535.9, "large"),
    (16, 64, 64, 1024): (267.9, "short"),
}
QUICK = (
    (1, 8, 8, 8192),
    (1, 8, 8, 65536),
    (1, 64, 16, 65536),
    (16, 1, 8, 200000),
    (16, 8, 8, 8192),
    (16, 64, 64, 1024),
)
# Goals of plan 0002, as multiples of the practical floor; for the class "latency" in microseconds, by point.
MUST = {"large": 1.65, "memory": 1.2, "short": 2.0, "medium": 2.1, "small": 2.6}
LATENCY_MUST = {(1, 1, 16, 8192): 13.0, (1, 8, 8, 8192): 16.0, (1, 8, 8, 1024): 11.0, (1, 16, 16, 1024): 13.0}
READ_BYTES_PER_SECOND = 4.49e12
MMA_FLOPS_PER_SECOND = 630e12
WIDTH, LATENT = 576, 512
SM_SCALE = 192**-0.5
ROTATED_BYTES = 260_000_000


def tree(nodes: int, generator: torch.Generator) -> torch.Tensor:
    """Visibility of a random tree, uint8 [nodes, nodes]: every node sees itself and its ancestors."""
    visible = torch.eye(nodes, dtype=torch.uint8)
    for node in range(1, nodes):
        visible[node] |= visible[int(torch.randint(0, node, (1,), generator=generator))]
    return visible


def inputs(point: tuple[int, int, int, int], pool: torch.Tensor, seed: int, *, mask: bool) -> dict[str, Any]:
    """One set of arguments."""
    batch, nodes, heads, prefix = point
    on_host = torch.Generator().manual_seed(seed)
    on_gpu = torch.Generator("cuda").manual_seed(seed)
    rows = batch * nodes

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=on_gpu).bfloat16()

    arguments = {
        "q": normal(rows, heads, WIDTH),
        "kv_pool": pool,
        "draft_kv": normal(rows, WIDTH),
        "qo_indptr": torch.arange(batch + 1, dtype=torch.int32, device="cuda") * nodes,
        "kv_indptr": torch.arange(batch + 1, dtype=torch.int32, device="cuda") * prefix,
        "kv_indices": torch.randint(len(pool), (batch * prefix,), device="cuda", generator=on_gpu),
        "sm_scale": SM_SCALE,
        "max_q_len": nodes,
        "max_kv_len": prefix,
    }
    if mask:
        arguments["mask"] = torch.cat([tree(nodes, on_host).flatten() for _ in range(batch)]).cuda()
    return arguments


def problem(point: tuple[int, int, int, int], arguments: dict[str, Any], out: torch.Tensor, lse: torch.Tensor) -> str:
    """What is wrong with an answer: first and last head of the last request against float64; empty if nothing."""
    batch, nodes, heads, prefix = point
    rows, picked = slice((batch - 1) * nodes, batch * nodes), [0, heads - 1]
    slots = arguments["kv_indices"][(batch - 1) * prefix :]
    keys = torch.cat([arguments["kv_pool"][slots], arguments["draft_kv"][rows]]).double()
    scores = torch.einsum("thd,kd->thk", arguments["q"][rows][:, picked].double(), keys) * SM_SCALE
    seen = torch.ones(nodes, nodes, dtype=torch.bool, device="cuda").tril()
    if "mask" in arguments:
        seen = arguments["mask"][-nodes * nodes :].view(nodes, nodes).bool()
    scores[:, :, prefix:].masked_fill_(~seen[:, None], -torch.inf)
    expected = torch.softmax(scores, -1) @ keys[:, :LATENT]
    error = ((out[rows][:, picked].double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    lse_error = (lse[rows][:, picked] - torch.logsumexp(scores, -1)).abs().max().item()
    if torch.isnan(out).any() or torch.isnan(lse).any():
        return "an output was not written"
    if not (error <= OUT_ROW_REL_L2 and lse_error <= LSE_ABS):
        return f"row relL2 {error:.2e}, lse {lse_error:.2e} from float64"
    return ""


class TimedPoint(Timed):
    """A point's calls with one library."""

    def __init__(self, point: tuple[int, int, int, int], sets: list[dict[str, Any]], library: Any) -> None:
        batch, nodes, heads, _ = point
        out = torch.full((batch * nodes, heads, LATENT), torch.nan, dtype=torch.bfloat16, device="cuda")
        lse = torch.full((batch * nodes, heads), torch.nan, device="cuda")
        self.kept = (sets, out, lse)
        verify_attn_paged(**sets[0], out=out, lse=lse, library=library)
        self.problem = problem(point, sets[0], out, lse)
        super().__init__([partial(verify_attn_paged, **each, out=out, lse=lse, library=library) for each in sets])


def measure(
    point: tuple[int, int, int, int], pool: torch.Tensor, libraries: list[Any], replays: int, *, mask: bool = True
) -> list[TimedPoint]:
    """The calls of every library at a point, timed in turns."""
    batch, nodes, heads, prefix = point
    moved = batch * (prefix + nodes) * WIDTH * 2 + batch * nodes * heads * (WIDTH + LATENT) * 2
    count = min(200, -(-ROTATED_BYTES // moved))
    sets = [inputs(point, pool, seed, mask=mask) for seed in range(count)]
    timed = [TimedPoint(point, sets, library) for library in libraries]
    for turn in range(replays):
        for each in timed if turn % 2 else reversed(timed):
            each.replay()
    return timed


def row(point: tuple[int, int, int, int], timed: TimedPoint) -> dict[str, Any]:
    """A point's figures."""
    batch, nodes, heads, prefix = point
    microseconds = statistics.median(timed.times)
    moved = batch * (prefix + nodes) * WIDTH * 2 + batch * nodes * heads * (WIDTH + LATENT) * 2
    flops = 2 * batch * nodes * heads * prefix * (WIDTH + LATENT)
    floor = max(moved / READ_BYTES_PER_SECOND, flops / MMA_FLOPS_PER_SECOND) * 1e6
    found: dict[str, Any] = {
        "point": list(point),
        "us": round(microseconds, 2),
        "spread": round((max(timed.times) - min(timed.times)) / microseconds, 4),
        "tflops": round(flops / microseconds * 1e-6, 1),
        "gbs": round(moved / microseconds * 1e-3, 1),
        "x_floor": round(microseconds / floor, 2),
        "problem": timed.problem,
    }
    if point in POINTS:
        practical, kind = POINTS[point]
        must = LATENCY_MUST[point] if kind == "latency" else MUST[kind] * practical
        found |= {"x_practical": round(microseconds / practical, 2), "class": kind, "must_us": round(must, 1)}
        found["met"] = bool(microseconds <= must)
    return found


def record(rows: list[dict[str, Any]], extra: dict[str, Any]) -> dict[str, Any]:
    """What `--json` writes."""
    root = evidence.checkout(Path(__file__).parent)
    return {
        "schema": 1,
        "created": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "kernels": evidence.digests(root, "phase2", "cuda")["kernels"],
        "versions": {"kdtree_engine": __version__, "torch": torch.__version__, "numpy": np.__version__},
        "points": rows,
        **extra,
    }


def point_of(text: str) -> tuple[int, int, int, int]:
    """A point from "batch,nodes,heads,prefix"."""
    parts = tuple(int(part) for part in text.split(","))
    if len(parts) != 4 or min(parts) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected batch,nodes,heads,prefix as 16,8,8,8192")
    return parts


def main() -> int:
    """Run the command; 0 when every timed answer was right."""
    parser = argparse.ArgumentParser(prog="verify_attn_paged", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--points", type=point_of, nargs="+", help="batch,nodes,heads,prefix ...; default: the 24 points"
    )
    parser.add_argument("--quick", action="store_true", help="six points")
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--library", type=Path, nargs="+", help="builds to time in turns; default: the one in use")
    parser.add_argument("--masks", action="store_true", help="also the cost of a mask, and of 128 and 256 nodes")
    parser.add_argument("--json", type=Path, help="write the record there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device; this benchmark times kernels on a GPU", file=sys.stderr)
        return 1
    libraries = [find_library(path) for path in arguments.library] if arguments.library else [find_library("cuda")]
    pool = torch.empty(3_600_000, WIDTH, dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for part in pool.split(400_000):
        part.copy_(torch.randn(part.shape, device="cuda", generator=generator))
    points = arguments.points or (QUICK if arguments.quick else tuple(POINTS))
    rows, wrong = [], False
    print(f"{'batch,nodes,heads,prefix':>24}  {'us':>8} spread TFLOP/s    GB/s x floor x practical   must")
    for point in points:
        for timed in measure(point, pool, libraries, arguments.replays):
            figures = row(point, timed)
            rows.append(figures)
            wrong |= bool(figures["problem"])
            goal = f"{figures['must_us']:>7} {'met' if figures['met'] else 'missed'}" if "must_us" in figures else ""
            name = ",".join(map(str, point))
            print(
                f"{name:>24}  {figures['us']:8.1f} {figures['spread']:6.1%} {figures['tflops']:7.1f}"
                f" {figures['gbs']:7.0f} {figures['x_floor']:7.2f} {figures.get('x_practical', ''):>11}{goal}"
                f" {figures['problem']}",
                flush=True,
            )
    extra: dict[str, Any] = {}
    if arguments.masks:
        library = libraries[:1]
        for point in ((1, 64, 16, 65536), (16, 8, 8, 8192), (16, 64, 64, 1024)):
            masked, chain = (
                statistics.median(measure(point, pool, library, arguments.replays, mask=mask)[0].times)
                for mask in (True, False)
            )
            extra.setdefault("mask_cost", {})[",".join(map(str, point))] = round(masked / chain - 1, 4)
        per_row = {
            nodes: statistics.median(measure((4, nodes, 16, 32768), pool, library, arguments.replays)[0].times) / nodes
            for nodes in (64, 128, 256)
        }
        extra["time_per_node_over_64"] = {nodes: round(time / per_row[64], 3) for nodes, time in per_row.items()}
        print(json.dumps(extra))
    if arguments.json:
        arguments.json.write_text(json.dumps(record(rows, extra), indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
