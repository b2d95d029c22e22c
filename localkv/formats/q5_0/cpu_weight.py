"""q5_0: five bits less 16, and a scale."""

from __future__ import annotations

from localkv.formats.cpu.five_bit_panels import FIFTH_BITS, five_bit_codes
from localkv.formats.cpu.panel_codes import QS, D, PanelFormat, planes

PANELS = PanelFormat(planes("q5_0", QS, FIFTH_BITS, D), five_bit_codes, zero=16)
