"""q5_0 on the CPU, without Numba; planes d, qh, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, codes
from localkv.formats.cpu.panel_layout import FIFTH_BITS, QS, D, planes

BLOCK = 32
SCALED = True
AFFINE = False
PLANES = (SCALES, codes(1, rows=2, unit_items=2), codes(8))

OFFSET = 16

LAYOUT = planes("q5_0", QS, FIFTH_BITS, D)
