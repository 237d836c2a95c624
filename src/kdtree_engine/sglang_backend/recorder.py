"""Capture from serving: verify steps of a running server as bundles, for `nox -s bundle -- add FILE`.

    KDTREE_ENGINE_CAPTURE          folder for the bundles; default: no capture
    KDTREE_ENGINE_CAPTURE_COUNT    bundles that are written at most, default 8
    KDTREE_ENGINE_CAPTURE_BYTES    what they may come to together, default 268435456
    KDTREE_ENGINE_CAPTURE_EVERY    verify steps from one to the next, default 100
    KDTREE_ENGINE_CAPTURE_LAYERS   layers, in turn, as 0,30,60; default 0
    KDTREE_ENGINE_CAPTURE_KEYS     the longest step: prefix tokens of a batch; default 32768

A bundle holds one layer of one step: queries, the key rows that they read, the trees. It holds no token, of a prompt or
of a draft, and no name of a machine. In the mode auto, the step whose outputs first differed too much is kept as well.

A step is kept on the device (`device.Latch`), read between steps, and written by a thread. A disk that is full, or a
folder that cannot be written, ends the capture with one line; serving does not notice.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kdtree_engine import bundle as bundles
from kdtree_engine.errors import BundleError, KdtreeError
from kdtree_engine.sglang_backend.settings import count

if TYPE_CHECKING:
    from collections.abc import Callable

    from kdtree_engine.bundle import Array, Bundle

MAX_NODES = 1024  # of a batch

logger = logging.getLogger("kdtree_engine.sglang")


@dataclass(frozen=True)
class Limits:
    """What may be captured; the module's text says by which variable."""

    folder: Path
    count: int = 8
    size: int = 256 << 20
    every: int = 100
    layers: tuple[int, ...] = (0,)
    keys: int = 32768

    @classmethod
    def from_environment(cls) -> Limits | None:
        """None when no capture is asked for; KdtreeError for a variable that makes no sense."""
        folder = os.environ.get("KDTREE_ENGINE_CAPTURE")
        if not folder:
            return None
        name = "KDTREE_ENGINE_CAPTURE_LAYERS"
        words = os.environ.get(name, "0").split(",")
        if not all(word.strip().isdecimal() for word in words):
            raise KdtreeError(f"{name}: got {','.join(words)!r}, expected layer numbers as 0,30,60")
        return cls(
            folder=Path(folder),
            count=count("KDTREE_ENGINE_CAPTURE_COUNT", cls.count),
            size=count("KDTREE_ENGINE_CAPTURE_BYTES", cls.size),
            every=count("KDTREE_ENGINE_CAPTURE_EVERY", cls.every),
            layers=tuple(map(int, words)),
            keys=count("KDTREE_ENGINE_CAPTURE_KEYS", cls.keys),
        )


@dataclass(frozen=True, eq=False)
class Step:
    """One layer of a verify step, on the host.

    Attributes:
        q: bfloat16 bits [T, H, d]; k: the drafts' rows [T, d]; kv: rows of the prefixes, in order.
        slots: int64 [rows of kv], where they lie in the pool.
        mask: uint8 [T, n or more], what each node sees of its request's; None for chains.
        qo_indptr, kv_indptr: int64 [B + 1], of nodes and of prefix rows.
    """

    layer: int
    why: str
    q: Array
    k: Array
    kv: Array
    slots: Array
    mask: Array | None
    qo_indptr: Array
    kv_indptr: Array
    d_latent: int
    sm_scale: float
    model_type: str


def to_bundle(step: Step, name: str) -> Bundle:
    """The step as a bundle of one layer, without weights and without tokens: only the attention can be checked on it.

    Requests that a CUDA graph was padded with are left out: their prefix is the one row of slot 0, which SGLang keeps
    for that. Slots are numbered anew, in the pool's order.

    Raises:
        BundleError: the mask is not a tree's, or the step is none that a bundle can hold.
    """
    requests = [
        (slice(first, last), slice(start, end))
        for (first, last), (start, end) in zip(
            itertools.pairwise(step.qo_indptr.tolist()), itertools.pairwise(step.kv_indptr.tolist()), strict=True
        )
        if step.slots[start:end].tolist() != [0]
    ]
    if not requests:
        raise BundleError("requests", "the step has none; capture another")
    nodes, prefixes = (np.array([part.stop - part.start for part in parts]) for parts in zip(*requests, strict=True))
    trees = [_tree(step, rows) for rows, _ in requests]
    # Drafts are handed over beside the pool; here they lie behind all else. Requests may share rows, a bundle's do not.
    beyond = int(step.slots.max(initial=0)) + 1
    slots = np.concatenate(
        [part for rows, keys in requests for part in (step.slots[keys], np.arange(rows.start, rows.stop) + beyond)]
    )
    made = bundles.Bundle(
        name=name,
        page_size=1,
        num_slots=len(slots),
        num_heads=step.q.shape[1],
        d_latent=step.d_latent,
        d_rope=step.q.shape[2] - step.d_latent,
        sm_scale=step.sm_scale,
        origin="captured",
        model="none",
        provenance={
            "generator": "kdtree_engine.sglang_backend",
            "layer": step.layer,
            "why": step.why,
            "model_type": step.model_type,
            "libraries": {"sglang": importlib.metadata.version("sglang")},
        },
        request=bundles.Request(
            prefix_len=prefixes.astype(np.int32),
            num_nodes=nodes.astype(np.int32),
            qo_indptr=_indptr(nodes),
            kv_indptr=_indptr(prefixes + nodes),
            kv_indices=np.argsort(np.argsort(slots, kind="stable")).astype(np.int64),
        ),
        # Tokens are nobody's business; a node's number tells siblings apart.
        context=bundles.Context(tokens=np.zeros(int(prefixes.sum()), np.int32)),
        tree=bundles.Tree(
            tokens=np.concatenate([np.arange(n, dtype=np.int32) for n in nodes]),
            parents=np.concatenate([parents for parents, _, _ in trees]).astype(np.int32),
            depths=np.concatenate([depths for _, depths, _ in trees]).astype(np.int32),
            visibility=np.concatenate([visible.reshape(-1) for _, _, visible in trees]),
        ),
        layers=(
            bundles.Layer(
                q=np.concatenate([step.q[rows] for rows, _ in requests]),
                kv=np.concatenate([part for rows, keys in requests for part in (step.kv[keys], step.k[rows])]),
            ),
        ),
    )
    bundles.validate(made)
    return made


def _indptr(sizes: Array) -> Array:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def _tree(step: Step, rows: slice) -> tuple[Array, Array, Array]:
    """Parents, depths and visibility of a request, from what its nodes see: a node's parent is the deepest of them."""
    n = rows.stop - rows.start
    visible = np.tri(n, dtype=np.uint8) if step.mask is None else (step.mask[rows, :n] != 0).astype(np.uint8)
    depths = visible.sum(axis=1, dtype=np.int64) - 1
    others = np.where(visible - np.eye(n, dtype=np.uint8) == 1, depths[None, :], -1)
    return np.where(depths > 0, others.argmax(axis=1), -1), depths, visible


class Recorder:
    """Decides which steps are kept, and writes them.

    Attributes:
        limits: what was asked for.
        written: files, as they appeared.
        watches: whether a breach is to be kept; once.
    """

    def __init__(self, limits: Limits, log: Callable[..., None]) -> None:
        self.limits, self.written, self.watches = limits, list[Path](), True
        self._log = log
        self._steps, self._size, self._left = 0, 0, limits.count
        self._layers = itertools.cycle(limits.layers)
        self._jobs: queue.Queue[Step] = queue.Queue()
        self._writer: threading.Thread | None = None
        self.broken = False

    def wanted(self) -> int | None:
        """The layer to keep of the next verify step, or None."""
        self._steps += 1
        if self.broken or self._left <= 0 or self._steps % self.limits.every:
            return None
        return next(self._layers)

    def put(self, step: Step) -> None:
        """Takes a step over; it is written soon."""
        self._left -= 1
        if step.why == "breach":
            self.watches = False
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="kdtree-capture", daemon=True)
            self._writer.start()
        self._jobs.put(step)

    def drain(self) -> None:
        """Waits until everything that was put is written."""
        self._jobs.join()

    def skip(self, reason: str) -> None:
        """A step that was kept cannot be a bundle."""
        self._left -= 1
        logger.warning("capture: left out: %s", reason)

    def _write_all(self) -> None:
        while True:
            step = self._jobs.get()
            try:
                if not self.broken:
                    self._write(step)
            finally:
                self._jobs.task_done()

    def _write(self, step: Step) -> None:
        name = f"serving_{time.strftime('%Y%m%d_%H%M%S', time.gmtime())}_layer{step.layer}_{len(self.written)}"
        path = self.limits.folder / f"{name}.h5"
        # As stored; packing makes it less.
        size = step.q.nbytes + step.k.nbytes + step.kv.nbytes
        if self._size + size > self.limits.size:
            self._end(f"the next bundle would pass {self.limits.size} bytes")
            return
        try:
            self.limits.folder.mkdir(parents=True, exist_ok=True)
            bundles.write(path, to_bundle(step, name))
        except BundleError as error:
            if error.argument == "path":
                self._end(str(error))
            else:
                logger.warning("capture: left out: %s", error)
            return
        except OSError as error:
            self._end(f"cannot write {path}: {error.strerror}")
            return
        self._size += size
        self.written.append(path)
        logger.info("capture: wrote %s", path)
        self._log("capture", file=path.name, layer=step.layer, why=step.why)

    def _end(self, reason: str) -> None:
        self.broken = True
        logger.warning("capture: ended: %s", reason)
