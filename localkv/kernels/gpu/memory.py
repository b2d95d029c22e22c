"""The memory of a CUDA device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from localkv.kernels.device_memory import Room

ROUNDS = 6
"""Times that a copy is timed; the best counts, as other programs only take bandwidth away."""


@dataclass(frozen=True)
class CudaMemory:
    """See `DeviceMemory`."""

    device: torch.device

    def room(self) -> Room:
        free, total = torch.cuda.mem_get_info(self.device)
        taken = torch.cuda.memory_allocated(self.device)
        return Room(free + torch.cuda.memory_reserved(self.device) - taken, taken, total)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def copy_seconds(self, n_bytes: int) -> float:
        source = torch.ones(n_bytes // 8, dtype=torch.int64, device=self.device)
        target = torch.empty_like(source)
        seconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - started)
        return min(seconds)
