"""How packed weights lie in memory for the CPU's products: panels of 16 rows.

A *panel* holds 16 rows of a matrix, one row per SIMD lane; a *record* is the part of a panel that
covers `record_values` values of each row. Within a record every field of ggml's block has a plane
of its own, and a plane is transposed in units of a few bytes: unit u of row 0, of row 1, ... of row
15, then unit u + 1. With units of four codes this is what `vpdpbusd` multiplies; with units of a
scale, 16 scales are one vector. Nothing is recoded, so panels take the bytes of the file, plus
those that complete the last panel and the last record.

This file knows bytes; what they mean is in `linear_blocks.py`.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from localkv.kernels.cpu.panel_bytes import LANES, PANEL_FORMAT_NAMES, record_values
from localkv.quant_formats import FORMATS
from localkv.quant_formats.base import QuantFormat

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
    """Memory for panels in few large pieces.

    Large pieces can have huge pages, which a product that streams through a weight needs: with
    small ones the processor's prefetching stops every 4 KiB.
    """

    PIECE_BYTES = 32 << 20
    ALIGNMENT = 4096

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def take(self, n_bytes: int) -> Bytes:
        """uint8 [n_bytes], aligned, of any content."""
        size = -(-n_bytes // self.ALIGNMENT) * self.ALIGNMENT
        if size > self.PIECE_BYTES // 2:
            return _map_memory(size)[:n_bytes]
        if size > len(self._free):
            self._free = _map_memory(self.PIECE_BYTES)
        piece, self._free = self._free[:size], self._free[size:]
        return piece[:n_bytes]


def _map_memory(n_bytes: int) -> Bytes:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(n_bytes, np.uint8)
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
