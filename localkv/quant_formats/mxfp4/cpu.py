"""mxfp4: nibbles that select from a table, and a power of two."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.mxfp4 import LAYOUT
from localkv.quant_formats.shared.bits import MXFP4_TWICE
from localkv.quant_formats.shared.cpu.panel_codes import PanelFormat, Record, nibble_codes
from localkv.simd.integer import look_up
from localkv.simd.vector import constant, f32, i32, lanes_of

ZERO = 12
"""Makes the table's values unsigned."""


def from_table(builder: Any, nibbles: Any) -> Any:
    """The values of each byte, `ZERO` too large."""
    return look_up(builder, [value + ZERO for value in MXFP4_TWICE], nibbles)


def table_codes(record: Record, block: int) -> list[Any]:
    return [from_table(record.builder, x) for x in nibble_codes(record, block)]


def power_of_two(record: Record, block: int, half: int) -> Any:
    """2^(e - 128): the exponent of a float32 is e - 1, and e = 0 and 1 are subnormal."""
    b = record.builder
    e = b.zext(record.small("e", block), lanes_of(i32))
    normal = b.shl(b.sub(e, constant(i32, 1)), constant(i32, 23))
    subnormal = b.shl(constant(i32, 1 << 21), e)
    is_normal = b.icmp_unsigned(">", e, constant(i32, 1))
    return b.bitcast(b.select(is_normal, normal, subnormal), lanes_of(f32))


PANELS = PanelFormat(LAYOUT, table_codes, scale=power_of_two, zero=ZERO)
