"""q5_K: as q4_K, and a fifth bit."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.q5_k import LAYOUT
from localkv.quant_formats.shared.cpu.panel_codes import (
    PanelFormat,
    Record,
    k_minimum,
    k_nibbles,
    k_scale,
    masked,
)


def codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    high = [masked(b, record.words("qh", i), block - 4, 16) for i in range(8)]
    return [b.or_(x, y) for x, y in zip(k_nibbles(record, block), high, strict=True)]


PANELS = PanelFormat(LAYOUT, codes, k_scale, k_minimum)
