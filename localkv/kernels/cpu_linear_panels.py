"""How packed weights lie in memory for the CPU's products: panels of 16 rows.

A *panel* holds 16 rows of a matrix, one row per SIMD lane; a *record* is the part of a panel that
covers `record_values` values of each row. Within a record every field of ggml's block has a plane
of its own, and a plane is transposed in units of a few bytes: unit u of row 0, of row 1, ... of row
15, then unit u + 1. With units of four codes this is what `vpdpbusd` multiplies; with units of a
scale, 16 scales are one vector. Nothing is recoded, so panels take the bytes of the file, plus
those that complete the last panel and the last record.

This file knows bytes; what they mean is in `cpu_linear_blocks.py`.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from localkv.kernels.cpu_panel_bytes import LANES, PANEL_FORMAT_NAMES, record_values
from localkv.quant_formats import FORMATS
from localkv.quant_formats.base import QuantFormat
from localkv.simd.compile_cache import CAN_CACHE
from localkv.simd.memory import address, get_i32, get_u8, get_u16, put_i32, put_u8, put_u16

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
        """For `fill_panels`: [planes, 5] start in the block, units, unit bytes, start, change."""
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


SIGN_BITS = np.int32(-0x7F7F7F80)  # 0x80808080


@njit
def spread_bits(word: Any) -> Any:
    """Bit 4 j + b moves to 8 b + j."""
    bits = np.uint32(word)
    out = np.uint32(0)
    for byte in range(4):
        for j in range(8):
            bit = (bits >> np.uint32(4 * j + byte)) & np.uint32(1)
            out |= bit << np.uint32(8 * byte + j)
    return np.int32(out)


@njit(parallel=True, nogil=True, cache=CAN_CACHE)
def fill_panels(
    rows: Bytes,
    n_out: int,
    block_bytes: int,
    record_blocks: int,
    record_bytes: int,
    table: npt.NDArray[np.int64],
    panels: Bytes,
) -> None:
    """Transpose the blocks of a matrix, or of a stack of them, into panels.

    Args:
        rows: [matrices * n_out, bytes of a row].
        table: `PanelLayout.table`.
        panels: [matrices * panels of one, bytes of a panel]; rows and blocks that complete a panel
            become zero.
    """
    row_blocks = rows.shape[1] // block_bytes
    matrix_panels = (n_out + LANES - 1) // LANES
    n_records = panels.shape[1] // record_bytes
    for panel in prange(panels.shape[0]):
        matrix, in_matrix = panel // matrix_panels, panel % matrix_panels
        first = matrix * n_out + in_matrix * LANES
        n_lanes = min(LANES, n_out - in_matrix * LANES)
        out = panels[panel]
        if n_lanes < LANES:
            out[:] = 0
        elif row_blocks < n_records * record_blocks:
            out[(n_records - 1) * record_bytes :] = 0
        for block in range(row_blocks):
            record = block // record_blocks * record_bytes
            in_record = block % record_blocks
            for plane in range(table.shape[0]):
                start = block * block_bytes + table[plane, 0]
                n_units, unit, change = table[plane, 1], table[plane, 2], table[plane, 4]
                to = record + table[plane, 3] + in_record * n_units * unit * LANES
                for lane in range(n_lanes):
                    row = address(rows) + (first + lane) * rows.shape[1] + start
                    goal = address(out) + to + lane * unit
                    if unit == 1:
                        for i in range(n_units):
                            put_u8(goal + i * LANES, 0, get_u8(row, i))
                    elif unit == 2:
                        put_u16(goal, 0, get_u16(row, 0))
                    elif change == SPREAD_BITS:
                        put_i32(goal, 0, spread_bits(get_i32(row, 0)))
                    elif change == FLIP_SIGNS:
                        for i in range(n_units):
                            put_i32(goal + 4 * LANES * i, 0, get_i32(row, i) ^ SIGN_BITS)
                    else:
                        for i in range(n_units):
                            put_i32(goal + 4 * LANES * i, 0, get_i32(row, i))


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
