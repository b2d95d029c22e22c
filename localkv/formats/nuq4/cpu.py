"""nuq4 on the CPU, without Numba; planes d, o, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, codes

BLOCK = 32
SCALED = True
AFFINE = False
OUTLIERS = 1
OFFSET = 128
PLANES = (SCALES, SCALES, codes(8))
