"""Calls captured into a CUDA graph, whose replays are timed by events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Timed:
    """Calls that have each run once before, in one graph; a time is a replay divided by their number."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.stream, self.count = torch.cuda.Stream(), len(calls)
        self.times: list[float] = []  # microseconds a call
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for call in calls:
                call()
        with torch.cuda.stream(self.stream):
            self.graph.replay()
            self.graph.replay()
        self.stream.synchronize()

    def replay(self) -> None:
        """Adds a time."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            begin.record()
            self.graph.replay()
            end.record()
        self.stream.synchronize()
        self.times.append(begin.elapsed_time(end) * 1e3 / self.count)
