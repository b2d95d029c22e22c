"""f16 on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.page_order import codes

BLOCK = 16
SCALED = False
AFFINE = False
PLANES = (codes(16),)
