"""q4_t on the CPU, without Numba; planes qs, d, m."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, codes

BLOCK = 32
SCALED = False
AFFINE = True
PLANES = (codes(8), SCALES, SCALES)

OFFSET = 8
