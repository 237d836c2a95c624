"""A verify step of a `world.World` in a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phases.phase3 import releases

if TYPE_CHECKING:
    from phases.phase3.world import World


class Graph:
    """A world's step in a CUDA graph, as SGLang's runner captures and replays it."""

    def __init__(self, world: World) -> None:
        self.world, self.batch = world, world.batch()
        backend, step = world.backend, world.step
        backend.init_cuda_graph_state(len(step.prefixes), len(step.prefixes) * step.nodes)
        backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self._attend()
        torch.cuda.synchronize()
        backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self._attend()

    def _attend(self) -> torch.Tensor:
        with releases.context(self.world.backend):
            return self.world.attend(self.batch)

    def prepare(self) -> None:
        """What the host does before a replay."""
        self.world.backend.init_forward_metadata_out_graph(self.batch)

    def replay(self) -> torch.Tensor:
        """The output of a step."""
        self.prepare()
        self.out.fill_(torch.nan)
        self.graph.replay()
        torch.cuda.synchronize()
        return self.out.clone()
