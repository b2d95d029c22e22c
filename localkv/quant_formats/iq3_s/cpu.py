"""iq3_s: points of four with signs, and scales of 32 values each."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.iq3_s import LAYOUT
from localkv.quant_formats.shared.cpu.grid_codes import (
    GridCodes,
    grid_codes,
    grid_panels,
    scale_of_nibble,
)
from localkv.quant_formats.shared.cpu.panel_codes import Record
from localkv.quant_formats.shared.grids import IQ3_S
from localkv.simd.shuffle import fields, widened

KIND = GridCodes(IQ3_S, zero=15)


def codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    high = widened(b, record.small("qh", block))
    places = [record.words("qs", 2 * block + i) for i in range(2)]
    upper = [fields(b, high, range(start, start + 4), 1) for start in (0, 4)]
    return grid_codes(b, KIND, places, upper, record.words("signs", block))


def scale(record: Record, block: int, half: int) -> Any:
    return scale_of_nibble(record, block // 2, block % 2, 1.0)


PANELS = grid_panels(LAYOUT, codes, scale, KIND)
