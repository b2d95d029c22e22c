"""q3_0 on the CPU, without Numba; planes d, qh, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, TWO_BITS, codes

BLOCK = 32
SCALED = True
AFFINE = False
PLANES = (SCALES, codes(1, rows=2, unit_items=2), TWO_BITS)

OFFSET = 4
