"""fp8_e4m3_token: fp8_e4m3; the kernel applies d."""

from __future__ import annotations

from localkv.formats.fp8_e4m3.cpu_cache import decode

__all__ = ["decode"]
