"""fp8_e5m2_token: fp8_e5m2; planes values and d; the kernel applies d."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES
from localkv.formats.fp8_e5m2.cpu import AFFINE, BLOCK, SCALED, decode
from localkv.formats.fp8_e5m2.cpu import PLANES as VALUES

PLANES = (*VALUES, SCALES)

__all__ = ["AFFINE", "BLOCK", "PLANES", "SCALED", "decode"]
