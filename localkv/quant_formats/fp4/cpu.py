"""Four-bit floats in panels on a CPU: nibbles that select from a table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from localkv.quant_formats import fp4
from localkv.quant_formats.shared.cpu.panel_codes import PanelFormat, Record, masked, nibble_codes
from localkv.simd.integer import look_up
from localkv.simd.memory import half_bits_to_float
from localkv.simd.vector import constant, f32, i8, i16, i32, lanes_of

ZERO = 12
"""Makes the table's values unsigned."""


def from_table(builder: Any, nibbles: Any) -> Any:
    """The values of each byte, `ZERO` too large."""
    return look_up(builder, [value + ZERO for value in fp4.TWICE], nibbles)


def mxfp4_codes(record: Record, block: int) -> list[Any]:
    return [from_table(record.builder, x) for x in nibble_codes(record, block)]


def power_of_two(record: Record, block: int, half: int) -> Any:
    """2^(e - 128): the exponent of a float32 is e - 1, and e = 0 and 1 are subnormal."""
    b = record.builder
    e = b.zext(record.small("e", block), lanes_of(i32))
    normal = b.shl(b.sub(e, constant(i32, 1)), constant(i32, 23))
    subnormal = b.shl(constant(i32, 1 << 21), e)
    is_normal = b.icmp_unsigned(">", e, constant(i32, 1))
    return b.bitcast(b.select(is_normal, normal, subnormal), lanes_of(f32))


def nvfp4_codes(record: Record, block: int) -> list[Any]:
    b, vectors = record.builder, []
    for group in (2 * block, 2 * block + 1):
        words = [record.words("qs", 2 * group + i) for i in range(2)]
        vectors += [from_table(b, masked(b, x, shift, 15)) for shift in (0, 4) for x in words]
    return vectors


def nvfp4_scale(record: Record, block: int, half: int) -> Any:
    """The numbers of `fp4.NVFP4_SCALES`: a byte's bits read as an fp16 number, whose mantissa
    begins with the same bits after an exponent with another bias. Its NaN is 0."""
    b = record.builder
    code = record.small("d", 2 * block + half)
    bits = b.zext(b.and_(code, constant(i8, 127)), lanes_of(i16))
    value = half_bits_to_float(b, b.shl(bits, constant(i16, 7)))
    is_nan = b.icmp_unsigned("==", code, constant(i8, 127))
    return b.select(is_nan, constant(f32, 0.0), b.fmul(value, constant(f32, 128.0)))


mxfp4 = SimpleNamespace(
    PANELS=PanelFormat(fp4.mxfp4.LAYOUT, mxfp4_codes, scale=power_of_two, zero=ZERO)
)
nvfp4 = SimpleNamespace(
    PANELS=PanelFormat(fp4.nvfp4.LAYOUT, nvfp4_codes, nvfp4_scale, zero=ZERO, halves=True)
)
