"""Powers of two and the hyperbolic tangent, lane by lane.

Both stand on 2^x = 2^n 2^r, n an integer and r in [-1/2, 1/2]. There 2^r - 1 = r q(r), and q is a
polynomial of degree 5 with a relative error of 1.1e-8 (least squares, reweighted to minimax).
"""

from __future__ import annotations

import math
from typing import Any

from localkv.simd.kinds import Builder, Value
from localkv.simd.vector import (
    F32x16,
    constant,
    f32,
    i32,
    lanes_of,
    lanewise,
    multiply_add,
)

_Q = (
    1.5403512e-4,
    1.33907353e-3,
    9.61823761e-3,
    5.55035733e-2,
    2.40226492e-1,
    6.93147182e-1,
)
"""Coefficients of q, the highest power first."""
_MAGIC = 1.5 * 2**23 + 127
"""x + _MAGIC, |x| < 2^22, is x rounded to an integer; its low bits are n + 127, an exponent."""


def _split(builder: Builder, x: Value) -> tuple[Any, Any, Any]:
    """2^n, r, and q(r) for x in [-127, 128)."""
    shifted = builder.fadd(x, constant(f32, _MAGIC))
    r = builder.fsub(x, builder.fsub(shifted, constant(f32, _MAGIC)))
    exponent = builder.shl(builder.bitcast(shifted, lanes_of(i32)), constant(i32, 23))
    q = constant(f32, _Q[0])
    for term in _Q[1:]:
        q = multiply_add(builder, q, r, constant(f32, term))
    return builder.bitcast(exponent, lanes_of(f32)), r, q


def _at_least(builder: Builder, x: Value, least: float) -> Value:
    """The larger; a NaN stays one, which costs nothing: x86's maximum yields its second operand."""
    bound = constant(f32, least)
    return builder.select(builder.fcmp_ordered("<", x, bound), bound, x)


def _exp2(builder: Builder, x: Value) -> Value:
    scale, r, q = _split(builder, _at_least(builder, x, -127.0))
    return builder.fmul(multiply_add(builder, r, q, constant(f32, 1.0)), scale)


def _tanh(builder: Builder, x: Value) -> Value:
    """e / (e + 2) with e = exp(2 x) - 1, which keeps the relative precision near 0."""
    twice = builder.fmul(x, constant(f32, 2 / math.log(2)))
    bound = constant(f32, 40.0)
    twice = _at_least(builder, twice, -40.0)
    twice = builder.select(builder.fcmp_ordered(">", twice, bound), bound, twice)
    scale, r, q = _split(builder, twice)
    rest = builder.fsub(scale, constant(f32, 1.0))
    e = multiply_add(builder, scale, builder.fmul(r, q), rest)
    return builder.fdiv(e, builder.fadd(e, constant(f32, 2.0)))


exp2 = lanewise(_exp2, [F32x16], F32x16)
"""2^x for x < 128, exactly 0 from -126.5 down, NaN of NaN; relative error below 1.5e-7."""
tanh = lanewise(_tanh, [F32x16], F32x16)
"""tanh(x), NaN of NaN; relative error below 5e-7."""
