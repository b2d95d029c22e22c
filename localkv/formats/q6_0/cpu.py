"""q6_0 on the CPU, without Numba; planes d, qh, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, codes

BLOCK = 32
SCALED = True
AFFINE = False
PLANES = (SCALES, codes(4, rows=8), codes(8))

OFFSET = 32
