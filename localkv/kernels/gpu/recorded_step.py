"""Steps that a GPU repeats as one CUDA graph, and numbers on their way back from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localkv.cache.arrays import Step

WARM_UP_STEPS = 2
"""Steps before one is recorded: the first may compile kernels and allocate."""


class GraphRecorder:
    """A `Recorder` of CUDA graphs, which share memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: tuple[int, int] | None = None

    def record(self, step: Step, state: Sequence[Tensor]) -> Step:
        """See `Recorder`."""
        kept = [buffer.clone() for buffer in state]

        def restore() -> None:
            for buffer, value in zip(state, kept, strict=True):
                buffer.copy_(value)

        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                step()
                restore()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):  # type: ignore[arg-type]
            result: Tensor = step()
        self._memory = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class TorchReadback:
    """A token on its way to the host."""

    def __init__(self, token: Tensor) -> None:
        self._host = torch.empty(1, dtype=torch.int64, pin_memory=True)
        self._host.copy_(token, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def value(self) -> int:
        """Wait for it."""
        self._event.synchronize()
        return int(self._host[0])
