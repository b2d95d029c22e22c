"""Floats as a half would have them, without instructions of a certain CPU."""

from __future__ import annotations

from localkv.simd.kinds import Builder, Value
from localkv.simd.vector import F32x16, call, constant, f32, i32, lanes_of, lanewise

LARGEST = 65504.0
SMALLEST_NORMAL = 2.0**-14
_DROPPED = 13
"""Bits that the mantissa of a half has less."""


def _rounded_to_half(b: Builder, x: Value) -> Value:
    for bound, order in ((LARGEST, ">"), (-LARGEST, "<")):
        limit = constant(f32, bound)
        x = b.select(b.fcmp_ordered(order, x, limit), limit, x)
    bits = b.bitcast(x, lanes_of(i32))
    odd = b.and_(b.lshr(bits, constant(i32, _DROPPED)), constant(i32, 1))
    bits = b.add(b.add(bits, constant(i32, (1 << _DROPPED - 1) - 1)), odd)
    normal = b.bitcast(b.and_(bits, constant(i32, -1 << _DROPPED)), lanes_of(f32))
    # the last bit of this number counts as much as that of a small half
    number = constant(f32, 0.75)
    small = b.fsub(b.fadd(x, number), number)
    size = call(b, "llvm.fabs.v16f32", lanes_of(f32), [x])
    y = b.select(b.fcmp_ordered("<", size, constant(f32, SMALLEST_NORMAL)), small, normal)
    return b.select(b.fcmp_unordered("uno", x, x), x, y)


rounded_to_half = lanewise(_rounded_to_half, [F32x16], F32x16)
"""The nearest half, ties to even, as a float; larger ones become the largest, NaN stays."""
