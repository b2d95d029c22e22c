"""iq1_m: points of eight, shifted by an eighth up or down, and scales of 16 values each."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.iq1_m import LAYOUT
from localkv.quant_formats.shared.cpu.grid_codes import (
    GridCodes,
    grid_codes,
    grid_panels,
    odd_scale,
)
from localkv.quant_formats.shared.cpu.panel_codes import Record
from localkv.quant_formats.shared.grids import IQ1
from localkv.simd.memory import half_bits_to_float
from localkv.simd.shuffle import fields, widened
from localkv.simd.vector import constant, i16, i32

KIND = GridCodes(
    IQ1,
    zero=9,
    factor=8,
    shift=1,
    flag_bits=tuple(4 * (column // 8) + 3 for column in range(32)),
    halves=True,
)


def codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    high = widened(b, record.shorts("qh", block))
    upper = fields(b, high, (0, 4, 8, 12), 3)
    return grid_codes(b, KIND, [record.words("qs", block)], [upper], high)


def _super_scale(record: Record) -> Any:
    """A half; each word has four bits of it, the lowest ones first."""
    b = record.builder
    bits = None
    for i in range(4):
        part = b.and_(record.shorts("scales", i), constant(i16, 0xF000))
        part = b.lshr(part, constant(i16, 12 - 4 * i)) if i < 3 else part
        bits = part if bits is None else b.or_(bits, part)
    return half_bits_to_float(b, bits)


def scale(record: Record, block: int, half: int) -> Any:
    b = record.builder
    pair, place = divmod(2 * block + half, 4)
    bits = b.lshr(widened(b, record.shorts("scales", pair)), constant(i32, 3 * place))
    return odd_scale(b, _super_scale(record), b.and_(bits, constant(i32, 7)), 1 / 8)


PANELS = grid_panels(LAYOUT, codes, scale, KIND)
