"""q5_1 on the CPU, without Numba; planes d, m, qh, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, codes
from localkv.formats.cpu.panel_layout import FIFTH_BITS, QS, D, M, planes

BLOCK = 32
SCALED = True
AFFINE = True
PLANES = (SCALES, SCALES, codes(1, rows=2, unit_items=2), codes(8))

OFFSET = 16

LAYOUT = planes("q5_1", QS, FIFTH_BITS, D, M)
