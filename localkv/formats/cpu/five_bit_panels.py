"""What q5_0 and q5_1 share in panels: nibbles, and a fifth bit of each."""

from __future__ import annotations

from typing import Any

from localkv.formats.cpu.panel_codes import Record, masked, nibble_codes


def five_bit_codes(record: Record, block: int) -> list[Any]:
    """Codes of a block of 32."""
    high = record.words("qh", block)
    low = nibble_codes(record, block)
    b = record.builder
    return [b.or_(x, masked(b, high, j - 4, 16)) for j, x in enumerate(low)]
