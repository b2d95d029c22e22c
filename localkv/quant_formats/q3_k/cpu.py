"""q3_K: three bits less 4, and scales of 16 values each, six bits less 32."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.q3_k import LAYOUT
from localkv.quant_formats.shared.cpu.panel_codes import (
    PanelFormat,
    Record,
    bit_field,
    masked,
    two_bit_words,
    whole_number,
)
from localkv.simd.vector import constant, i8


def codes(record: Record, block: int) -> list[Any]:
    b, shift = record.builder, 2 * (block % 4)
    low = [masked(b, x, shift, 3) for x in two_bit_words(record, block)]
    return [b.or_(x, masked(b, record.words("hmask", i), block - 2, 4)) for i, x in enumerate(low)]


def scale(record: Record, block: int, half: int) -> Any:
    """Scales are read as `bits.q3_k_codes` reads them, and multiplied by d."""
    b, group = record.builder, 2 * block + half
    low = bit_field(b, record.small("scales", group % 8), group // 8 * 4, 0x0F)
    high = bit_field(b, record.small("scales", 8 + group % 4), group // 4 * 2 - 4, 0x30)
    bits = b.sub(b.or_(low, high), constant(i8, 32))
    return b.fmul(record.halves("d"), whole_number(b, bits, signed=True))


PANELS = PanelFormat(LAYOUT, codes, scale, zero=4, halves=True)
