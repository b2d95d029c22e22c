"""q8_t on the CPU, without Numba; planes qs, d."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, codes

BLOCK = 32
SCALED = False
AFFINE = False
PLANES = (codes(8, rows=2, unit_items=2), SCALES)

OFFSET = 128
