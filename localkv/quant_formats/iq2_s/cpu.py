"""iq2_s: points of eight with signs, and scales of 16 values each."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.iq2_s import LAYOUT
from localkv.quant_formats.shared.cpu.grid_codes import (
    GridCodes,
    grid_codes,
    grid_panels,
    scale_of_nibble,
)
from localkv.quant_formats.shared.cpu.panel_codes import Record
from localkv.quant_formats.shared.grids import IQ2_S
from localkv.simd.shuffle import fields, widened

KIND = GridCodes(IQ2_S, zero=43, halves=True)


def codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    upper = fields(b, widened(b, record.small("qh", block)), (0, 2, 4, 6), 2)
    places, signs = record.words("qs", block), record.words("signs", block)
    return grid_codes(b, KIND, [places], [upper], signs)


def scale(record: Record, block: int, half: int) -> Any:
    return scale_of_nibble(record, block, half, 1 / 8)


PANELS = grid_panels(LAYOUT, codes, scale, KIND)
