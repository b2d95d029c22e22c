"""iq4_nl on the CPU, without Numba; planes d, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, codes
from localkv.formats.cpu.panel_layout import QS, D, planes

BLOCK = 32
SCALED = True
AFFINE = False
PLANES = (SCALES, codes(8))

OFFSET = 128

LAYOUT = planes("iq4_nl", QS, D)
