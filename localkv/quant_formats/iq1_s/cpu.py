"""iq1_s: points of eight, shifted by an eighth up or down."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.iq1_s import LAYOUT
from localkv.quant_formats.shared.cpu.grid_codes import (
    GridCodes,
    grid_codes,
    grid_panels,
    odd_scale,
)
from localkv.quant_formats.shared.cpu.panel_codes import Record
from localkv.quant_formats.shared.grids import IQ1
from localkv.simd.shuffle import fields, widened
from localkv.simd.vector import constant, i32

KIND = GridCodes(IQ1, zero=9, factor=8, shift=1, flag_bits=(15,) * 32)


def codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    high = widened(b, record.shorts("qh", block))
    upper = fields(b, high, (0, 3, 6, 9), 3)
    return grid_codes(b, KIND, [record.words("qs", block)], [upper], high)


def scale(record: Record, block: int, half: int) -> Any:
    b = record.builder
    bits = b.lshr(widened(b, record.shorts("qh", block)), constant(i32, 12))
    return odd_scale(b, record.halves("d"), b.and_(bits, constant(i32, 7)), 1 / 8)


PANELS = grid_panels(LAYOUT, codes, scale, KIND)
