"""iq2_xs: points of eight with signs, and scales of 16 values each."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.iq2_xs import LAYOUT
from localkv.quant_formats.shared.cpu.grid_codes import (
    GridCodes,
    even_signs,
    grid_codes,
    grid_panels,
    scale_of_nibble,
)
from localkv.quant_formats.shared.cpu.panel_codes import Record
from localkv.quant_formats.shared.grids import IQ2_XS
from localkv.simd.shuffle import split_bytes

KIND = GridCodes(IQ2_XS, zero=43, halves=True)


def codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    words = [record.words("qs", 2 * block + i) for i in range(2)]
    places, upper = split_bytes(b, *words)
    signs = even_signs(b, upper, (1, 9, 17, 25))
    return grid_codes(b, KIND, [places], [upper], signs)


def scale(record: Record, block: int, half: int) -> Any:
    return scale_of_nibble(record, block, half, 1 / 8)


PANELS = grid_panels(LAYOUT, codes, scale, KIND)
