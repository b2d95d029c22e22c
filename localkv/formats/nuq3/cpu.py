"""nuq3 on the CPU, without Numba; planes d, o, qh, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, TWO_BITS, codes

BLOCK = 32
SCALED = True
AFFINE = False
OUTLIERS = 1
OFFSET = 128
PLANES = (SCALES, SCALES, codes(1, rows=2, unit_items=2), TWO_BITS)
