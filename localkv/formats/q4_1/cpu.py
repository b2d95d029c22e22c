"""q4_1 on the CPU, without Numba; planes d, m, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, codes
from localkv.formats.cpu.panel_layout import QS, D, M, planes

BLOCK = 32
SCALED = True
AFFINE = True
PLANES = (SCALES, SCALES, codes(8))

OFFSET = 8

LAYOUT = planes("q4_1", QS, D, M)
