"""fp8_e5m2_token on the CPU, without Numba; planes values and d."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES
from localkv.formats.fp8_e5m2.cpu import AFFINE, BLOCK, SCALED
from localkv.formats.fp8_e5m2.cpu import PLANES as VALUES

PLANES = (*VALUES, SCALES)

__all__ = ["AFFINE", "BLOCK", "PLANES", "SCALED"]
