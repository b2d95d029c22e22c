"""q5_K: as q4_K, and a fifth bit."""

from __future__ import annotations

from typing import Any

from localkv.formats.cpu.panel_codes import DMIN, QS, SCALES, D, PanelFormat, Record, masked, planes
from localkv.formats.cpu.panel_layout import PanelPlane
from localkv.formats.cpu.super_block_panels import k_minimum, k_nibbles, k_scale


def codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    high = [masked(b, record.words("qh", i), block - 4, 16) for i in range(8)]
    return [b.or_(x, y) for x, y in zip(k_nibbles(record, block), high, strict=True)]


LAYOUT = planes("q5_K", QS, PanelPlane("qh", 4), SCALES, D, DMIN)
PANELS = PanelFormat(LAYOUT, codes, k_scale, k_minimum)
