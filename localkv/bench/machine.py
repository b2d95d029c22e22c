"""The machine: its GPU, the bandwidth of its memory, the peak of memory that was used.

Nothing here knows of models.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from localkv.kernels.cpu.linear.panel_arena import PanelArena

CPU_BUFFER, GPU_BUFFER = 512 << 20, 1 << 30
"""Bytes that are read, or copied, to measure bandwidth: more than any cache holds."""
ROUNDS = 6
"""Times it is measured; the best counts, as other programs only take bandwidth away."""


def gpu_name() -> str:
    """The GPU's name; empty where torch sees none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def bandwidth(device: torch.device, n_bytes: int | None = None) -> float:
    """Bytes per second: on a CPU of a read by torch's threads, on a GPU of a copy, both ways.

    Args:
        n_bytes: size of the buffer; None is one that no cache holds.
    """
    if device.type == "cuda":
        source = torch.ones((n_bytes or GPU_BUFFER) // 8, dtype=torch.int64, device=device)
        target = torch.empty_like(source)

        def copy() -> None:
            target.copy_(source)
            torch.cuda.synchronize(device)

        return 2 * source.nbytes / _shortest(copy)
    # memory as weights have it
    memory = PanelArena().take(n_bytes or CPU_BUFFER)
    values = torch.from_numpy(memory).view(torch.int64).fill_(1)
    return values.nbytes / _shortest(lambda: values.sum())


def _shortest(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


class PeakMemory:
    """The most memory that is taken from when this was made: the GPU's, or this process'.

    The process' peak is the system's count of resident bytes: Python, libraries and the pages of a
    mapped file are part of it. Where the system can't forget an earlier peak, that one counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def n_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _peak_resident()


def _peak_resident() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        # kilobytes, except on macOS
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
