"""Bytes as people read them."""

from __future__ import annotations


def byte_size(n_bytes: int) -> str:
    """In the largest unit of which it is one or more, as "1.50 MiB"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.2f} {unit}"
    return f"{n_bytes} B"
