"""What formats with blocks of 256 share in panels: their codes, and q4_K's and q5_K's scales."""

from __future__ import annotations

from typing import Any

from localkv.formats.cpu.panel_codes import Record, masked, whole_number
from localkv.simd.vector import constant, i8


def k_nibbles(record: Record, block: int) -> list[Any]:
    """The low four bits of the codes of a block of 32."""
    words = [record.words("qs", block // 2 * 8 + i) for i in range(8)]
    return [masked(record.builder, x, block % 2 * 4, 15) for x in words]


def two_bit_words(record: Record, block: int) -> list[Any]:
    """Words whose bytes have q2_K's or q3_K's codes of a block of 32 from bit 2 (block % 4) on."""
    return [record.words("qs", block // 4 * 8 + i) for i in range(8)]


def record_scale(record: Record, block: int, half: int) -> Any:
    """One for all 256 values."""
    return record.halves("d")


def small_scale(record: Record, block: int, *, minimum: bool) -> Any:
    """Scale or minimum of a q4_K or q5_K block as <16 x float> (ggml's `get_scale_min_k4`)."""
    b = record.builder
    if block < 4:
        bits = record.small("scales", block + 4 * minimum)
        bits = b.and_(bits, constant(i8, 63))
    else:
        nibbles = record.small("scales", block + 4)
        low = b.lshr(nibbles, constant(i8, 4)) if minimum else b.and_(nibbles, constant(i8, 15))
        high = b.lshr(record.small("scales", block - 4 + 4 * minimum), constant(i8, 6))
        bits = b.or_(low, b.shl(high, constant(i8, 4)))
    return whole_number(b, bits)


def k_scale(record: Record, block: int, half: int) -> Any:
    return record.builder.fmul(record.halves("d"), small_scale(record, block, minimum=False))


def k_minimum(record: Record, block: int, half: int) -> Any:
    b = record.builder
    return b.fneg(b.fmul(record.halves("dmin"), small_scale(record, block, minimum=True)))
