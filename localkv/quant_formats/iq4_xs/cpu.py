"""iq4_xs: nibbles as iq4_nl's, and scales of 32 values each, six bits less 32."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.iq4_nl.cpu import codebook_codes
from localkv.quant_formats.iq4_xs import LAYOUT
from localkv.quant_formats.shared.cpu.panel_codes import (
    PanelFormat,
    Record,
    bit_field,
    whole_number,
)
from localkv.simd.vector import constant, i8


def scale(record: Record, block: int, half: int) -> Any:
    """Scales are read as `bits.iq4_xs_codes` reads them, and multiplied by d."""
    b = record.builder
    low = bit_field(b, record.small("scales_l", block // 2), block % 2 * 4, 0x0F)
    high = bit_field(b, record.small("scales_h", block // 4), block % 4 * 2 - 4, 0x30)
    bits = b.sub(b.or_(low, high), constant(i8, 32))
    return b.fmul(record.halves("d"), whole_number(b, bits, signed=True))


PANELS = PanelFormat(LAYOUT, codebook_codes, scale, zero=128)
