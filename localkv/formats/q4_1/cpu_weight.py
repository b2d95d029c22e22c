"""q4_1: nibbles, a scale and a minimum."""

from __future__ import annotations

from localkv.formats.cpu.panel_codes import PanelFormat, block_minimum, nibble_codes
from localkv.formats.q4_1.cpu import LAYOUT

PANELS = PanelFormat(LAYOUT, nibble_codes, minimum=block_minimum)
