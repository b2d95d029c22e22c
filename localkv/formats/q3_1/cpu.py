"""q3_1 on the CPU, without Numba; planes d, m, qh, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, TWO_BITS, codes

BLOCK = 32
SCALED = True
AFFINE = True
PLANES = (SCALES, SCALES, codes(1, rows=2, unit_items=2), TWO_BITS)

OFFSET = 4
