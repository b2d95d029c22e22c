"""q5_1: five bits, a scale and a minimum."""

from __future__ import annotations

from localkv.formats.cpu.five_bit_panels import five_bit_codes
from localkv.formats.cpu.panel_codes import PanelFormat, block_minimum
from localkv.formats.q5_1.cpu import LAYOUT

PANELS = PanelFormat(LAYOUT, five_bit_codes, minimum=block_minimum)
