"""The machine: its GPU, the bandwidth of its memory, the peak of memory that was used.

Nothing here knows of models.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from localkv.kernels.backend import Backend
from localkv.kernels.cpu.linear.panel_arena import PanelArena
from localkv.system.threads import n_threads

CPU_BUFFER, GPU_BUFFER = 512 << 20, 1 << 30
"""Bytes that are read, or copied, to measure bandwidth: more than any cache holds."""
ROUNDS = 6
"""Times it is measured; the best counts, as other programs only take bandwidth away."""


def bandwidth(backend: Backend, n_bytes: int | None = None) -> float:
    """Bytes per second: on a CPU of a read by all threads, on a GPU of a copy, both ways.

    Args:
        n_bytes: size of the buffer; None is one that no cache holds.
    """
    if backend.memory is not None:
        copied = n_bytes or GPU_BUFFER
        return 2 * copied / backend.memory.copy_seconds(copied)
    # memory as weights have it
    values = PanelArena().take(n_bytes or CPU_BUFFER).view(np.int64)
    values.fill(1)
    parts = np.array_split(values, n_threads())
    with ThreadPoolExecutor(len(parts)) as pool:
        return values.nbytes / _shortest(lambda: list(pool.map(np.sum, parts)))


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

    def __init__(self, backend: Backend) -> None:
        self.memory = backend.memory
        if self.memory is not None:
            self.memory.reset_peak()
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def n_bytes(self) -> int:
        return _peak_resident() if self.memory is None else self.memory.peak()


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
