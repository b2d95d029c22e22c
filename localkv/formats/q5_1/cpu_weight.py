"""q5_1: five bits, a scale and a minimum."""

from __future__ import annotations

from localkv.formats.cpu.five_bit_panels import FIFTH_BITS, five_bit_codes
from localkv.formats.cpu.panel_codes import QS, D, M, PanelFormat, block_minimum, planes

LAYOUT = planes("q5_1", QS, FIFTH_BITS, D, M)
PANELS = PanelFormat(LAYOUT, five_bit_codes, minimum=block_minimum)
