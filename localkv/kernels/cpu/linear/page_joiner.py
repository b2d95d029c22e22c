"""Small pages of panels become huge ones while their model is in use.

Linux does so by itself where it was asked to (MADV_HUGEPAGE), but by default with 16 MiB every ten
seconds. So a thread asks for one huge page after the other (MADV_COLLAPSE, Linux 6.1), and rests
for most of the time, since the cores are wanted. What is in memory stays the same.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
import weakref
from queue import SimpleQueue

HUGE_BYTES = 2 << 20
MADV_COLLAPSE = 25
REST = 10
"""Rests are so many times as long as joining a page took, which is 0.5 to 20 ms."""


class PageJoiner:
    """Joins pages in a thread of its own, which is started when there are some.

    Attributes:
        n_tried: huge pages that it has asked for.
    """

    def __init__(self) -> None:
        self.n_tried = 0
        self._waiting = SimpleQueue[tuple[weakref.ref[mmap.mmap], int, int]]()
        self._thread: threading.Thread | None = None

    def add(self, memory: mmap.mmap, first: int, end: int) -> None:
        """Join the huge pages that lie in a part of anonymous memory.

        Args:
            first, end: its address, and that behind it.
        """
        first = -(-first // HUGE_BYTES) * HUGE_BYTES
        if first + HUGE_BYTES > end or sys.platform != "linux":
            return
        self._waiting.put((weakref.ref(memory), first, end))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="huge pages", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        while True:
            reference, first, end = self._waiting.get()
            for start in range(first, end - HUGE_BYTES + 1, HUGE_BYTES):
                memory = reference()
                if memory is None:
                    break
                began = time.perf_counter()
                madvise(start, HUGE_BYTES, MADV_COLLAPSE)  # refused: pages stay small
                self.n_tried += 1
                del memory
                time.sleep(REST * (time.perf_counter() - began))
