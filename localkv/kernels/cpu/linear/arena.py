"""Memory for panels of weights, whose small pages become huge ones while their model is in use.

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
from queue import Queue
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_BYTES = 2 << 20
MADV_COLLAPSE = 25
REST = 10
"""How many times as long as joining a page took a rest is; joining takes 0.5 to 20 ms."""


class PageJoiner:
    """Joins pages in a thread of its own, which is started when there are some.

    Attributes:
        n_tried: huge pages that it has asked for.
    """

    def __init__(self) -> None:
        self.n_tried = 0
        self._rest = REST
        self._waiting = Queue[tuple[weakref.ref[mmap.mmap], int, int]]()
        self._thread: threading.Thread | None = None

    def add(self, memory: mmap.mmap, first: int, end: int) -> None:
        """Join the huge pages that lie in a part of anonymous memory.

        Args:
            first, end: its address, and the one after it.
        """
        first = -(-first // HUGE_BYTES) * HUGE_BYTES
        if first + HUGE_BYTES > end or sys.platform != "linux":
            return
        self._waiting.put((weakref.ref(memory), first, end))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="huge pages", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Join all pages that wait for it, without rest."""
        self._rest = 0
        self._waiting.join()
        self._rest = REST

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
                time.sleep(self._rest * (time.perf_counter() - began))
            self._waiting.task_done()


Bytes = npt.NDArray[np.uint8]

JOINER = PageJoiner()
"""The one of all models."""


class PanelArena:
    """Memory for panels in few large pieces, which the system can give huge pages.

    A product that streams through a weight is 2 to 3 % quicker with huge pages when decoding: with
    small ones the processor's prefetching stops every 4 KiB. But they take long to get, above all
    in a virtual machine, whose host has to find them, and loading would wait for them. So panels
    are filled on small pages, which are joined while they are in use.
    """

    PIECE_BYTES = 32 << 20
    ALIGNMENT = 4096

    def __init__(self) -> None:
        self._piece = np.empty(0, np.uint8)

    def take(self, n_bytes: int) -> Bytes:
        """uint8 [n_bytes], aligned, zeros; call `join_pages` when it is filled."""
        size = -(-n_bytes // self.ALIGNMENT) * self.ALIGNMENT
        if size > self.PIECE_BYTES // 2:
            return _memory(size)[:n_bytes]
        if size > len(self._piece):
            self._piece = _memory(self.PIECE_BYTES)
        taken, self._piece = self._piece[:n_bytes], self._piece[size:]
        return taken

    def join_pages(self, taken: Bytes) -> None:
        """Have small pages of what was taken joined."""
        memory: Any = taken
        while isinstance(memory, np.ndarray):
            whole, memory = memory, memory.base
        if isinstance(memory, memoryview):  # as NumPy 2 has it
            memory = memory.obj
        if isinstance(memory, mmap.mmap) and hasattr(mmap, "MADV_HUGEPAGE"):
            start = taken.ctypes.data - whole.ctypes.data
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            memory.madvise(mmap.MADV_HUGEPAGE, first, start + taken.nbytes - first)
            # a huge page that another matrix shares is joined with the one that ends in it
            page = (taken.ctypes.data - 1) // HUGE_BYTES * HUGE_BYTES
            end = taken.ctypes.data + taken.nbytes
            JOINER.add(memory, max(page, whole.ctypes.data), end)


def _memory(n_bytes: int) -> Bytes:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return np.frombuffer(mmap.mmap(-1, n_bytes, flags=flags), np.uint8)
    return np.zeros(n_bytes, np.uint8)
