"""q6_0 on the CPU, without Numba; planes d, qh, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, TWO_BITS, codes

BLOCK = 32
SCALED = True
AFFINE = False
PLANES = (SCALES, TWO_BITS, codes(8))

OFFSET = 32
