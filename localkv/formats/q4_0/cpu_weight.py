"""q4_0: nibbles less 8, and a scale."""

from __future__ import annotations

from localkv.formats.cpu.panel_codes import PanelFormat, nibble_codes
from localkv.formats.q4_0.cpu import LAYOUT

PANELS = PanelFormat(LAYOUT, nibble_codes, zero=8)
