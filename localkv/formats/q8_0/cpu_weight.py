"""q8_0: bytes with a sign, which become unsigned, and a scale."""

from __future__ import annotations

from typing import Any

from localkv.formats.cpu.panel_codes import BLOCK_VECTORS, PanelFormat, Record
from localkv.formats.q8_0.cpu import LAYOUT


def byte_codes(record: Record, block: int) -> list[Any]:
    return [record.words("qs", BLOCK_VECTORS * block + i) for i in range(BLOCK_VECTORS)]


PANELS = PanelFormat(LAYOUT, byte_codes, zero=128)
