"""tq2_0: two bits less 1, and a scale of 256 values."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.shared.cpu.panel_codes import (
    PanelFormat,
    Record,
    masked,
    record_scale,
    two_bit_words,
)
from localkv.quant_formats.tq2_0 import LAYOUT


def codes(record: Record, block: int) -> list[Any]:
    shift = 2 * (block % 4)
    return [masked(record.builder, x, shift, 3) for x in two_bit_words(record, block)]


PANELS = PanelFormat(LAYOUT, codes, record_scale, zero=1)
