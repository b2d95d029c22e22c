"""q8_0: bytes with a sign, which become unsigned, and a scale."""

from __future__ import annotations

from typing import Any

from localkv.formats.cpu.panel_codes import BLOCK_VECTORS, D, PanelFormat, Record, planes
from localkv.formats.cpu.panel_layout import FLIP_SIGNS, PanelPlane


def byte_codes(record: Record, block: int) -> list[Any]:
    return [record.words("qs", BLOCK_VECTORS * block + i) for i in range(BLOCK_VECTORS)]


LAYOUT = planes("q8_0", PanelPlane("qs", 4, FLIP_SIGNS), D)
PANELS = PanelFormat(LAYOUT, byte_codes, zero=128)
