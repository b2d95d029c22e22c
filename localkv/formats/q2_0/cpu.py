"""q2_0 on the CPU, without Numba; planes d, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, TWO_BITS

BLOCK = 32
SCALED = True
AFFINE = False
PLANES = (SCALES, TWO_BITS)

OFFSET = 3
