"""q4_1: nibbles, a scale and a minimum."""

from __future__ import annotations

from localkv.formats.cpu.panel_codes import (
    QS,
    D,
    M,
    PanelFormat,
    block_minimum,
    nibble_codes,
    planes,
)

PANELS = PanelFormat(planes("q4_1", QS, D, M), nibble_codes, minimum=block_minimum)
