"""q2_1 on the CPU, without Numba; planes d, m, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, TWO_BITS

BLOCK = 32
SCALED = True
AFFINE = True
PLANES = (SCALES, SCALES, TWO_BITS)

OFFSET = 2
