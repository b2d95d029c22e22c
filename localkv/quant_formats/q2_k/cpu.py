"""q2_K: two bits, and scales and minima of 16 values each, which are nibbles of a byte."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.q2_k import LAYOUT
from localkv.quant_formats.shared.cpu.panel_codes import (
    PanelFormat,
    Record,
    masked,
    two_bit_words,
    whole_number,
)
from localkv.simd.cpu_features import HAS_VNNI
from localkv.simd.vector import constant, f32, i8

MOST_PLACE = 3 if HAS_VNNI else 2
"""Codes in bits 6 and 7 are larger than signed bytes, which other CPUs multiply."""


def place(block: int) -> int:
    """Codes are four to the power of this times as large, which `scale` makes up for."""
    return min(block % 4, MOST_PLACE)


def codes(record: Record, block: int) -> list[Any]:
    shift, mask = 2 * (block % 4 - place(block)), 3 << 2 * place(block)
    return [masked(record.builder, x, shift, mask) for x in two_bit_words(record, block)]


def scale(record: Record, block: int, half: int) -> Any:
    b = record.builder
    bits = b.and_(record.small("scales", 2 * block + half), constant(i8, 15))
    d = b.fmul(record.halves("d"), constant(f32, 0.25 ** place(block)))
    return b.fmul(d, whole_number(b, bits))


def minimum(record: Record, block: int, half: int) -> Any:
    b = record.builder
    bits = b.lshr(record.small("scales", 2 * block + half), constant(i8, 4))
    return b.fneg(b.fmul(record.halves("dmin"), whole_number(b, bits)))


PANELS = PanelFormat(LAYOUT, codes, scale, minimum, halves=True)
