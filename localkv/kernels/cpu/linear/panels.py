"""How packed weights lie in memory for the CPU's products: panels of 16 rows.

A *panel* holds 16 rows of a matrix, one row per SIMD lane; a *record* is the part of a panel that
covers `record_values` values of each row. Within a record every field of ggml's block has a plane
of its own, and a plane is transposed in units of a few bytes: unit u of row 0, of row 1, ... of row
15, then unit u + 1. With units of four codes this is what `vpdpbusd` multiplies; with units of a
scale, 16 scales are one vector. Nothing is recoded, so panels take the bytes of the file, plus
those that complete the last panel and the last record.

This file knows bytes; what they mean is in `linear/blocks.py`.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from localkv.formats import FORMATS
from localkv.formats.base import QuantFormat
from localkv.kernels.cpu.linear.panel_bytes import LANES, PANEL_FORMAT_NAMES, record_values

PLAIN, FLIP_SIGNS, SPREAD_BITS = 0, 1, 2
"""What happens to a unit on its way: nothing; the top bit of every byte is flipped (signed codes
become unsigned); bit 4 j + b of a word moves to 8 b + j (bits of consecutive codes go to the bytes
of their codes)."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PanelPlane:
    """One field of the block, or a part of one.

    Attributes:
        name: of the field.
        unit_bytes: bytes that stay together.
        change: what happens to a unit.
        part, n_parts: the field is divided into `n_parts`, and this is number `part`.
    """

    name: str
    unit_bytes: int
    change: int = PLAIN
    part: int = 0
    n_parts: int = 1


@dataclass(frozen=True)
class PanelLayout:
    """The planes of a record in order, codes first, as these are read as whole cache lines."""

    format: QuantFormat
    planes: tuple[PanelPlane, ...]

    @property
    def record_values(self) -> int:
        return record_values(self.format)

    @property
    def record_blocks(self) -> int:
        return self.record_values // self.format.block_size

    @property
    def record_bytes(self) -> int:
        return LANES * self.record_blocks * self.format.block_bytes

    def n_records(self, n_in: int) -> int:
        return -(-n_in // self.record_values)

    def panel_bytes(self, n_in: int) -> int:
        return self.n_records(n_in) * self.record_bytes

    @cached_property
    def offsets(self) -> dict[tuple[str, int], int]:
        """Where each plane (field, part) starts in a record."""
        sizes = {plane.name: plane.n_bytes for plane in self.format.planes}
        offsets, end = {}, 0
        for plane in self.planes:
            offsets[plane.name, plane.part] = end
            end += LANES * self.record_blocks * sizes[plane.name] // plane.n_parts
        return offsets

    @cached_property
    def table(self) -> npt.NDArray[np.int64]:
        """[planes, 5] start in the block, units, unit bytes, start in the record, change."""
        starts, end = {}, 0
        for field in self.format.planes:
            starts[field.name] = end, field.n_bytes
            end += field.n_bytes
        rows = []
        for plane in self.planes:
            start, n_bytes = starts[plane.name]
            n_bytes //= plane.n_parts
            rows.append(
                (
                    start + plane.part * n_bytes,
                    n_bytes // plane.unit_bytes,
                    plane.unit_bytes,
                    self.offsets[plane.name, plane.part],
                    plane.change,
                )
            )
        return np.array(rows, np.int64)


def _layout(name: str, *planes: PanelPlane) -> PanelLayout:
    return PanelLayout(FORMATS[name], planes)


_QS = PanelPlane("qs", 4)
_D, _M, _DMIN = (PanelPlane(name, 2) for name in ("d", "m", "dmin"))
_QH, _QH_BITS = PanelPlane("qh", 4), PanelPlane("qh", 4, SPREAD_BITS)
_SCALES = PanelPlane("scales", 1)
# what is read together lies together, or the processor does not recognise a stream
_Q6_K_CODES = [PanelPlane(name, 4, part=i, n_parts=2) for i in range(2) for name in ("ql", "qh")]

LAYOUTS = {
    layout.format.name: layout
    for layout in (
        _layout("q4_0", _QS, _D),
        _layout("q4_1", _QS, _D, _M),
        _layout("q5_0", _QS, _QH_BITS, _D),
        _layout("q5_1", _QS, _QH_BITS, _D, _M),
        _layout("q8_0", PanelPlane("qs", 4, FLIP_SIGNS), _D),
        _layout("iq4_nl", _QS, _D),
        _layout("q4_K", _QS, _SCALES, _D, _DMIN),
        _layout("q5_K", _QS, _QH, _SCALES, _D, _DMIN),
        _layout("q6_K", *_Q6_K_CODES, _SCALES, _D),
    )
}
"""The formats that have panels."""

assert tuple(LAYOUTS) == PANEL_FORMAT_NAMES


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
