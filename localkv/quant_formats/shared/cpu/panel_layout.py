"""How packed weights lie in memory for the CPU's products: panels of 16 rows.

A *panel* holds 16 rows of a matrix, one row per SIMD lane; a *record* is the part of a panel that
covers `record_values` values of each row. Within a record every field of ggml's block has a plane
of its own. A plane is transposed in units of a few bytes: unit u of row 0, of row 1, ... of row 15,
then unit u + 1. With units of four codes this is what `vpdpbusd` multiplies; with units of a scale,
16 scales are one vector. Nothing is recoded, so panels take the bytes of the file, and more for
what completes the last panel and the last record.

This file knows bytes; what they mean is in `panel_codes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from localkv.quant_formats import FORMATS
from localkv.quant_formats.base import QuantFormat

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


LANES = 16
"""Rows of a panel."""

CACHE_LINE = 64

BLOCK = 32
"""Columns that are multiplied before scales are applied, whatever the format's own blocks are."""

PLAIN, FLIP_SIGNS, SPREAD_BITS = 0, 1, 2
"""What happens to a unit on its way: nothing; the top bit of every byte is flipped (signed codes
become unsigned); bit 4 j + b of a word moves to 8 b + j (bits of consecutive codes go to the bytes
of their codes)."""


def record_values(fmt: QuantFormat) -> int:
    """Values of a row in a record: a large block, or enough small ones for whole cache lines."""
    n_values = max(64, fmt.block_size)
    if fmt.block_size < n_values and LANES * fmt.row_bytes(n_values) % CACHE_LINE:
        n_values *= 2
    return n_values


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
        import numpy as np  # memory plans need no arrays

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


QS, SCALES, EXPONENT = PanelPlane("qs", 4), PanelPlane("scales", 1), PanelPlane("e", 1)
FIFTH_BITS = PanelPlane("qh", 4, SPREAD_BITS)
D, M, DMIN = (PanelPlane(name, 2) for name in ("d", "m", "dmin"))


def planes(name: str, *fields: PanelPlane) -> PanelLayout:
    """The layout of a format's panels."""
    return PanelLayout(FORMATS[name], fields)
