"""nvfp4: nibbles that select from mxfp4's table, and scales of 16 values each in a byte."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.mxfp4.cpu import ZERO, from_table
from localkv.quant_formats.nvfp4 import LAYOUT
from localkv.quant_formats.shared.cpu.panel_codes import PanelFormat, Record, masked
from localkv.simd.memory import half_bits_to_float
from localkv.simd.vector import constant, f32, i8, i16, lanes_of


def codes(record: Record, block: int) -> list[Any]:
    b, vectors = record.builder, []
    for group in (2 * block, 2 * block + 1):
        words = [record.words("qs", 2 * group + i) for i in range(2)]
        vectors += [from_table(b, masked(b, x, shift, 15)) for shift in (0, 4) for x in words]
    return vectors


def scale(record: Record, block: int, half: int) -> Any:
    """The numbers of the reference's `SCALES`: a byte's bits read as an fp16 number, whose mantissa
    begins with the same bits after an exponent with another bias. Its NaN is 0."""
    b = record.builder
    code = record.small("d", 2 * block + half)
    bits = b.zext(b.and_(code, constant(i8, 127)), lanes_of(i16))
    value = half_bits_to_float(b, b.shl(bits, constant(i16, 7)))
    is_nan = b.icmp_unsigned("==", code, constant(i8, 127))
    return b.select(is_nan, constant(f32, 0.0), b.fmul(value, constant(f32, 128.0)))


PANELS = PanelFormat(LAYOUT, codes, scale, zero=ZERO, halves=True)
