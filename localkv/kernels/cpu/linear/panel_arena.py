"""Memory for panels of weights."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class PanelArena:
    """Memory for panels in few large pieces, which the system can give huge pages.

    A product that streams through a weight is 2 to 3 % quicker with huge pages when decoding: with
    small ones the processor's prefetching stops every 4 KiB. But they take long to get, above all
    in a virtual machine, whose host has to find them, and loading would wait for them. So panels
    are filled on small pages, and the system is asked to join these when it has time.
    """

    PIECE_BYTES = 32 << 20
    ALIGNMENT = 4096

    def __init__(self) -> None:
        self._piece = _Piece(0)
        self._taken_from = self._piece

    def take(self, n_bytes: int) -> Bytes:
        """uint8 [n_bytes], aligned, zeros; call `join_pages` when it is filled."""
        size = -(-n_bytes // self.ALIGNMENT) * self.ALIGNMENT
        if size > self.PIECE_BYTES // 2:
            self._taken_from = _Piece(size)
        else:
            if size > self._piece.n_free:
                self._piece = _Piece(self.PIECE_BYTES)
            self._taken_from = self._piece
        return self._taken_from.take(size)[:n_bytes]

    def join_pages(self) -> None:
        """Let the system join small pages of what was taken last."""
        self._taken_from.join_pages()


class _Piece:
    """Bytes that are taken from the first on."""

    def __init__(self, n_bytes: int) -> None:
        self._memory: mmap.mmap | None = None
        if n_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, n_bytes, flags=flags)
            self._bytes = np.frombuffer(self._memory, np.uint8)
        else:
            self._bytes = np.zeros(n_bytes, np.uint8)
        self._n_taken = self._n_joined = 0

    @property
    def n_free(self) -> int:
        return len(self._bytes) - self._n_taken

    def take(self, n_bytes: int) -> Bytes:
        start = self._n_taken
        self._n_taken += n_bytes
        return self._bytes[start : self._n_taken]

    def join_pages(self) -> None:
        if self._memory is not None:
            start = self._n_joined // mmap.PAGESIZE * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_HUGEPAGE, start, self._n_taken - start)
            self._n_joined = self._n_taken
