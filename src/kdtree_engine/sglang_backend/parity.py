"""Modes of the backend, and what it learns by comparing: counters, a log of JSON lines, the way from shadow to serve.

    off      the incumbent alone
    shadow   both run, the incumbent's output is used, ours is compared with it
    serve    ours is used, and the incumbent runs beside it on a share of steps, to be compared
    auto     shadow until every layer was compared often enough without a breach, then serve; at a breach back to shadow

Environment, read when the backend is made:

    KDTREE_ENGINE_MODE         off, shadow (default), serve or auto
    KDTREE_ENGINE_SAMPLE       share of verify steps that are compared; default 1 in shadow, 0.01 in serve
    KDTREE_ENGINE_BUDGET       how much longer comparing may make verify steps on average; default 0.25, a quarter
    KDTREE_ENGINE_AUTO_CALLS   comparisons a layer before auto serves; default 1000
    KDTREE_ENGINE_PARITY_LOG   file for the log; default none
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from kdtree_engine.errors import KdtreeError
from kdtree_engine.ops.verify_attn_paged import OUT_ROW_REL_L2
from kdtree_engine.sglang_backend.settings import count, share

MODES = ("off", "shadow", "serve", "auto")
# Each of the two is within its own error of the exact result. The incumbent rounds what ours rounds, softmax weights
# and output, but divides by the sum of unrounded weights, so that a weight's error may count by itself: 2^-8 more.
ROW_REL_L2 = 2 * OUT_ROW_REL_L2 + 2.0**-8
LOG_BYTES = 16_000_000  # of a log file before it is put aside
LOG_FILES = 3  # that are kept beside the one in use

logger = logging.getLogger("kdtree_engine.sglang")


@dataclass
class Layer:
    """What was found out about one layer."""

    compared: int = 0
    breaches: int = 0
    rel_l2: float = 0.0  # the worst of any comparison
    row_rel_l2: float = 0.0
    max_abs: float = 0.0


class Log:
    """JSON lines in a file that is put aside when it is full. One that cannot be written ends the log, nothing else."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, event: str, **facts: Any) -> None:
        """Adds a line."""
        if self._path is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **facts}) + "\n"
        try:
            if self._path.exists() and self._path.stat().st_size + len(line) > LOG_BYTES:
                self._rotate(self._path)
            with self._path.open("a") as file:
                file.write(line)
        except OSError as error:
            logger.warning("parity log: cannot write %s: %s; no more is logged", self._path, error.strerror)
            self._path = None

    @staticmethod
    def _rotate(path: Path) -> None:
        kept = [path.with_name(f"{path.name}.{number}") for number in range(1, LOG_FILES + 1)]
        for older, newer in zip(reversed(kept), [*reversed(kept[:-1]), path], strict=True):
            if newer.exists():
                newer.replace(older)


class Budget:
    """How large a share of the steps may be compared, so that comparing makes them longer by no more than asked.

    Learns what a step takes with and without a comparison from the time between the beginnings of steps that follow
    each other; the medians of the last ones count, so that a pause does not.
    """

    ENOUGH = 8  # steps of a kind, before it is known what they take

    def __init__(self, most: float = math.inf) -> None:
        self.most = most
        self._seconds: dict[bool, deque[float]] = {kind: deque(maxlen=64) for kind in (False, True)}

    def took(self, seconds: float, *, compared: bool) -> None:
        """A step's time."""
        self._seconds[compared].append(seconds)

    def share(self) -> float:
        """From 0 to 1. Until enough is known every second step may be compared."""
        if math.isinf(self.most):
            return 1.0
        plain, compared = self._seconds[False], self._seconds[True]
        if min(len(plain), len(compared)) < self.ENOUGH:
            return 0.5
        extra = median(compared) - median(plain)
        return 1.0 if extra <= 0 else min(1.0, self.most * median(plain) / extra)


@dataclass
class Parity:
    """The state of one process: its mode, counters and log.

    Attributes:
        mode: as it was asked for.
        budget: how many steps may be compared for what they cost.
        metrics: where counters are also told, or None.
        serving: whether ours is used; in auto, whether the comparisons have led there.
        counters: how often what happened: calls of verify attention by who served them, comparisons, fallbacks by
            reason, errors.
    """

    mode: str = "shadow"
    shadow_share: float = 1.0
    serve_share: float = 0.01
    auto_calls: int = 1000
    budget: Budget = field(default_factory=Budget)
    log: Log = field(default_factory=lambda: Log(None))
    metrics: Any = None
    serving: bool = False
    counters: Counter[str] = field(default_factory=Counter)
    layers: dict[int, Layer] = field(default_factory=dict)
    _owed: float = 0.0
    _told: set[str] = field(default_factory=set)

    @classmethod
    def from_environment(cls) -> Parity:
        """Raises KdtreeError for a variable that makes no sense."""
        mode = os.environ.get("KDTREE_ENGINE_MODE", "shadow")
        path = os.environ.get("KDTREE_ENGINE_PARITY_LOG")
        parity = cls(
            shadow_share=share("KDTREE_ENGINE_SAMPLE", 1.0),
            serve_share=share("KDTREE_ENGINE_SAMPLE", 0.01),
            budget=Budget(share("KDTREE_ENGINE_BUDGET", 0.25, most=math.inf)),
            auto_calls=count("KDTREE_ENGINE_AUTO_CALLS", 1000),
            log=Log(None if path is None else Path(path)),
        )
        parity.set_mode(mode)
        return parity

    def set_mode(self, mode: str) -> None:
        """Changes the mode from the next step on; KdtreeError for one that there is not."""
        if mode not in MODES:
            raise KdtreeError(f"KDTREE_ENGINE_MODE: got {mode!r}, expected one of {', '.join(MODES)}")
        self.mode, self.serving = mode, mode == "serve"
        for layer in self.layers.values():
            layer.compared = layer.breaches = 0
        logger.info("verify attention: mode %s", mode)
        self.log.write("mode", mode=mode, serving=self.serving)

    def compares(self) -> bool:
        """Whether the next step is compared; a share of steps is, evenly, and no more than the budget allows."""
        if self.mode == "off":
            return False
        wanted = self.serve_share if self.serving else self.shadow_share
        self._owed += min(wanted, self.budget.share())
        if self._owed < 1:
            return False
        self._owed -= 1
        return True

    def fall_back(self, reason: str, *, error: bool = False) -> None:
        """The incumbent serves what ours was to serve; said once a reason, counted always."""
        self.counters[f"fallback: {reason}"] += 1
        self.counters["errors"] += error
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("verify attention: left to SGLang's kernel: %s", reason)
            self.log.write("fallback", reason=reason, error=error)

    def compared(self, layer_id: int, calls: int, rel_l2: float, row_rel_l2: float, max_abs: float) -> bool:
        """Takes the worst of some comparisons of a layer; whether they were within the bound."""
        layer = self.layers.setdefault(layer_id, Layer())
        layer.compared += calls
        self.counters["compared"] += calls
        # NaN counts as a breach.
        within = row_rel_l2 <= ROW_REL_L2
        layer.rel_l2, layer.row_rel_l2 = max(layer.rel_l2, rel_l2), max(layer.row_rel_l2, row_rel_l2)
        layer.max_abs = max(layer.max_abs, max_abs)
        figures = {"rel_l2": rel_l2, "row_rel_l2": row_rel_l2, "max_abs": max_abs}
        self.log.write("parity", layer=layer_id, calls=calls, within=within, **figures)
        if not within:
            layer.breaches += 1
            self._breach(layer_id, figures)
        return within

    def _breach(self, layer_id: int, figures: dict[str, float]) -> None:
        self.counters["breaches"] += 1
        words = (
            f"layer {layer_id}: a row differs by {figures['row_rel_l2']:.3g} of its length, allowed {ROW_REL_L2:.3g}"
        )
        logger.error("verify attention: parity broken, %s", words)
        self.log.write("breach", layer=layer_id, **figures)
        if self.mode == "auto":
            was, self.serving = self.serving, False
            for layer in self.layers.values():
                layer.compared = 0
            if was:
                logger.error("verify attention: back to SGLang's kernel, in shadow")
                self.log.write("mode", mode="auto", serving=False)

    def promote(self, num_layers: int) -> None:
        """In auto, serves once every layer was compared often enough."""
        if self.mode != "auto" or self.serving or len(self.layers) < num_layers:
            return
        if all(layer.compared >= self.auto_calls for layer in self.layers.values()):
            self.serving = True
            logger.warning("verify attention: %d comparisons a layer without a breach, now serving", self.auto_calls)
            self.log.write("mode", mode="auto", serving=True)


_process: Parity | None = None


def shared() -> Parity:
    """The process's state, made from the environment at first: SGLang makes several backends in a process."""
    global _process
    if _process is None:
        _process = Parity.from_environment()
    return _process


def set_mode(mode: str) -> None:
    """Changes the mode of this process from the next step on; KdtreeError for one that there is not."""
    shared().set_mode(mode)


def get_mode() -> str:
    """The mode of this process."""
    return shared().mode
