"""Times the kernels of op verify_attn: `python -m benchmarks.verify_attn [--json FILE]`.

Every timed kernel is first compared with a float64 reference on the same inputs; a wrong one gets no time. On a GPU
the launches of one point go into a CUDA graph, over as many input sets as it takes to read 260 MB before one repeats
(so that no input is in L2), outputs are poisoned with NaN first, and the figure is the median replay. The ceiling of
float32 arithmetic is measured in the same run. Without a GPU the host build is timed against itself: that says nothing
about a GPU, and the output says so.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kdtree_engine import library, verify_attn
from kdtree_engine.evidence import checkout, digests

SM_SCALE = 192**-0.5
D_LATENT, D_QK = 512, 576
BEYOND_L2 = 260e6  # bytes read before an input set repeats


@dataclass(frozen=True)
class Point:
    """A shape: requests, nodes a request, heads, keys a request."""

    batch: int
    q_len: int
    num_heads: int
    kv_len: int

    @property
    def rows(self) -> int:
        return self.batch * self.q_len * self.num_heads

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.kv_len * (D_QK + D_LATENT)

    @property
    def bytes_in(self) -> float:
        return 4.0 * D_QK * (self.batch * self.kv_len + self.rows) + self.batch * self.q_len * self.kv_len

    def __str__(self) -> str:
        return f"{self.batch},{self.q_len},{self.num_heads},{self.kv_len}"


POINTS: tuple[Point, ...] = (
    Point(1, 1, 16, 8192),
    Point(1, 8, 8, 32768),
    Point(4, 8, 16, 1024),
    Point(1, 16, 64, 8192),
    Point(2, 64, 64, 8192),
    Point(4, 64, 64, 32768),
)
HOST_POINTS: tuple[Point, ...] = (Point(1, 8, 8, 256), Point(2, 4, 16, 320))


@dataclass(frozen=True)
class Row:
    """One measured kernel at one point."""

    point: str
    kernel: str
    microseconds: float
    spread: float
    tflops: float
    rel_l2: float


def tree_mask(rng: np.random.Generator, point: Point) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A random tree's visibility behind a fully visible prefix, uint8 [batch, q_len, kv_len]."""
    mask = np.ones((point.batch, point.q_len, point.kv_len), np.uint8)
    for request in range(point.batch):
        visible = np.eye(point.q_len, dtype=np.uint8)
        for node in range(1, point.q_len):
            visible[node] |= visible[rng.integers(node)]
        mask[request, :, point.kv_len - point.q_len :] = visible
    return mask


def time_host(point: Point, kernels: list[str]) -> list[Row]:
    from oracle.verify_attn import verify_attn as reference

    rng = np.random.default_rng(point.rows * point.kv_len)
    q = rng.standard_normal((point.batch, point.q_len, point.num_heads, D_QK), np.float32)
    kv = rng.standard_normal((point.batch, point.kv_len, D_QK), np.float32)
    mask = tree_mask(rng, point)
    expected, _ = reference(q, kv, sm_scale=SM_SCALE, mask=mask)
    rows = []
    for kernel in kernels:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            out, _ = verify_attn(q, kv, sm_scale=SM_SCALE, mask=mask, kernel=kernel)
            times.append(time.perf_counter() - start)
        rel_l2 = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
        rows.append(_row(point, kernel, times, rel_l2))
    return rows


def _row(point: Point, kernel: str, seconds: list[float], rel_l2: float) -> Row:
    if not rel_l2 <= 1e-5:
        raise SystemExit(
            f"{kernel} at {point}: relative L2 error {rel_l2:.2e} against float64; a wrong result is not timed"
        )
    median = statistics.median(seconds)
    spread = (max(seconds) - min(seconds)) / median
    return Row(str(point), kernel, median * 1e6, spread, point.flops / median / 1e12, rel_l2)


def _reference_rows(torch: Any, q: Any, kv: Any, mask: Any, rows: list[tuple[int, int, int]]) -> Any:
    """float64 results of single (request, node, head) rows."""
    results = []
    for request, node, head in rows:
        keys = kv[request].double()
        scores = keys @ q[request, node, head].double() * SM_SCALE
        scores = scores.masked_fill(mask[request, node] == 0, -math.inf)
        results.append(torch.softmax(scores, 0) @ keys[:, :D_LATENT])
    return torch.stack(results)


def time_cuda(point: Point, kernels: list[str], replays: int) -> list[Row]:
    import torch

    generator = torch.Generator("cuda").manual_seed(point.rows * point.kv_len)
    num_sets = max(1, min(64, math.ceil(BEYOND_L2 / point.bytes_in)))
    mask = torch.from_numpy(tree_mask(np.random.default_rng(point.rows), point)).cuda()

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device="cuda")

    sets = [
        (random(point.batch, point.q_len, point.num_heads, D_QK), random(point.batch, point.kv_len, D_QK))
        for _ in range(num_sets)
    ]
    picks = [(b % point.batch, b * 7 % point.q_len, b * 5 % point.num_heads) for b in range(16)]
    expected = _reference_rows(torch, *sets[-1], mask, picks)
    out = torch.empty(point.batch, point.q_len, point.num_heads, D_LATENT, device="cuda")
    lse = torch.empty(point.batch, point.q_len, point.num_heads, device="cuda")

    rows = []
    for kernel in kernels:

        def launch_all(kernel: str = kernel) -> None:
            for q, kv in sets:
                verify_attn(q, kv, sm_scale=SM_SCALE, mask=mask, kernel=kernel, out=out, lse=lse)

        out.fill_(math.nan)
        launch_all()
        actual = torch.stack([out[pick] for pick in picks]).double()
        rel_l2 = float((actual - expected).norm() / expected.norm())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch_all()
        for _ in range(2):
            graph.replay()
        times = []
        for _ in range(replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / num_sets)
        rows.append(_row(point, kernel, times, rel_l2))
    return rows


def fma_peak(path: Path) -> float:
    """TFLOP/s of float32 multiply-adds from registers, best of five bursts of about 5 ms."""
    import torch

    function = ctypes.CDLL(str(path)).kdtree_benchmark_fma_peak
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    values = torch.rand(512, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    best = 0.0
    for _ in range(6):  # the first warms up
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        flops = function(values.data_ptr(), 40000, stream)
        end.record()
        end.synchronize()
        if flops < 0:
            raise SystemExit("fma_peak: the launch failed; is the library built for this GPU?")
        best = max(best, flops / begin.elapsed_time(end) / 1e9)
    return best


def summarise(rows: list[Row], baseline: str, peak: float | None) -> list[str]:
    by_point: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_point.setdefault(row.point, {})[row.kernel] = row
    header = f"{'B,q,H,kv':>16}  {'kernel':<20} {'us':>10} {'spread':>7} {'TFLOP/s':>8} {'relL2':>8} {'x baseline':>10}"
    lines = [header + (f" {'of FMA peak':>11}" if peak else "")]
    ratios: dict[str, list[float]] = {}
    for point, kernels in by_point.items():
        for row in kernels.values():
            ratio = kernels[baseline].microseconds / row.microseconds
            ratios.setdefault(row.kernel, []).append(ratio)
            line = f"{point:>16}  {row.kernel:<20} {row.microseconds:10.1f} {row.spread:7.1%}"
            line += f" {row.tflops:8.3f} {row.rel_l2:8.1e} {ratio:10.2f}"
            lines.append(line + (f" {row.tflops / peak:11.1%}" if peak else ""))
    for kernel, values in ratios.items():
        if kernel != baseline:
            mean = statistics.geometric_mean(values)
            lines.append(f"{kernel}: {mean:.2f} x {baseline}, geometric mean of {len(values)} points")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify_attn", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--point", action="append", metavar="B,q,H,kv", help="a shape; repeatable; default: the six of the plan"
    )
    parser.add_argument("--kernel", action="append", help="a kernel; repeatable; default: all of the op")
    parser.add_argument("--replays", type=int, default=15, help="timed graph replays a point on a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args(argv)

    try:
        import torch

        on_gpu = torch.cuda.is_available()
    except ModuleNotFoundError:
        on_gpu = False
    loaded = library("cuda" if on_gpu else "host")
    kernels = arguments.kernel or [info.name for info in loaded.kernels if info.op == "verify_attn"]
    points = POINTS if on_gpu else HOST_POINTS
    if arguments.point:
        points = tuple(Point(*map(int, text.split(","))) for text in arguments.point)

    peak = None
    if on_gpu:
        device = torch.cuda.get_device_name()
        peak = fma_peak(loaded.path.with_name("libkdtree_benchmark.so"))
        print(f"{device}: float32 FMA peak {peak:.1f} TFLOP/s, measured in this run")
    else:
        device = "host"
        print("No GPU: the host build is timed against itself. These times say nothing about a GPU.")
    rows: list[Row] = []
    for point in points:
        rows += time_cuda(point, kernels, arguments.replays) if on_gpu else time_host(point, kernels)
    print("\n".join(summarise(rows, kernels[0], peak)))
    if arguments.json:
        result = {
            "device": device,
            "created": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "kernels_digest": digests(checkout(), "phase1", "benchmark")["kernels"],
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda} if on_gpu else {},
            "fma_peak_tflops": peak,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
