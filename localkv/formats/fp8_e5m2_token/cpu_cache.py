"""fp8_e5m2_token: fp8_e5m2; the kernel applies d."""

from __future__ import annotations

from localkv.formats.fp8_e5m2.cpu_cache import decode

__all__ = ["decode"]
