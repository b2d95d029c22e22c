"""q4_0: nibbles less 8, and a scale."""

from __future__ import annotations

from localkv.formats.cpu.panel_codes import QS, D, PanelFormat, nibble_codes, planes

PANELS = PanelFormat(planes("q4_0", QS, D), nibble_codes, zero=8)
