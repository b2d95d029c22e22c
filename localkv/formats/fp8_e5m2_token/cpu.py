"""fp8_e5m2_token: fp8_e5m2; planes values, d, of which the kernel applies d."""

from __future__ import annotations

from localkv.formats.fp8_e5m2.cpu import AFFINE, BLOCK, SCALED, decode

__all__ = ["AFFINE", "BLOCK", "SCALED", "decode"]
