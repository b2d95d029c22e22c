"""iq4_nl: nibbles that select from a codebook, and a scale."""

from __future__ import annotations

from typing import Any

from localkv.formats.bits import IQ4_CODEBOOK
from localkv.formats.cpu.panel_codes import PanelFormat, Record, nibble_codes
from localkv.formats.iq4_nl.cpu import LAYOUT
from localkv.simd.byte_tables import look_up


def codebook_codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    entries = [value + 128 for value in IQ4_CODEBOOK]
    return [look_up(b, entries, x) for x in nibble_codes(record, block)]


PANELS = PanelFormat(LAYOUT, codebook_codes, zero=128)
