"""The counters of a process on SGLang's metrics endpoint, where --enable-metrics is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Metrics:
    """Prometheus counters `kdtree_engine:verify_events_total`, by event, and the gauge `kdtree_engine:serving`.

    The events are those of `Parity.counters`. SGLang's endpoint sums the processes of a server.
    """

    def __init__(self, rank: int) -> None:
        # Not before SGLang has said where several processes put their figures.
        from prometheus_client import Counter, Gauge

        labels = ["tp_rank", "event"]
        self._events = Counter("kdtree_engine:verify_events", "Verify attention calls and what became of them.", labels)
        self._serving: Any = Gauge(
            "kdtree_engine:serving",
            "1 where kdtree-engine's output of verify attention is used.",
            labels[:1],
            multiprocess_mode="livemostrecent",
        ).labels(rank)
        self._rank, self._told = rank, dict[str, int]()

    def update(self, counters: Mapping[str, int], *, serving: bool) -> None:
        """Adds what was counted since the last call."""
        for event, value in counters.items():
            if more := value - self._told.get(event, 0):
                self._events.labels(self._rank, event).inc(more)
                self._told[event] = value
        self._serving.set(serving)
