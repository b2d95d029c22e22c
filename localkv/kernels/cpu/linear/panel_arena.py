"""Memory for panels of weights."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from localkv.kernels.cpu.linear.page_joiner import HUGE_BYTES, PageJoiner

Bytes = npt.NDArray[np.uint8]

JOINER = PageJoiner()
"""Of all models."""


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
