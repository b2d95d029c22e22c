"""q5_0: five bits less 16, and a scale."""

from __future__ import annotations

from localkv.formats.cpu.five_bit_panels import five_bit_codes
from localkv.formats.cpu.panel_codes import PanelFormat
from localkv.formats.q5_0.cpu import LAYOUT

PANELS = PanelFormat(LAYOUT, five_bit_codes, zero=16)
