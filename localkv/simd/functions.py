"""Functions of floats, lane by lane: powers of two, tanh, log(1 + x), roots, rounding to halves.

The first two stand on 2^x = 2^n 2^r, n an integer and r in [-1/2, 1/2]. There 2^r - 1 = r q(r), and
q is a polynomial of degree 5 with a relative error of 1.1e-8 (least squares, reweighted to
minimax).
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from localkv.simd.kinds import Builder, Value
from localkv.simd.vector import (
    F32x16,
    call,
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


_HALF_ROOT = 0x3F3504F3
"""The bits of sqrt(1/2): mantissas lie between it and sqrt(2)."""
_TERMS = (2 / 9, 2 / 7, 2 / 5, 2 / 3)
"""Of log((1 + s) / (1 - s)) / s - 2 in powers of s^2, the highest first; |s| < 0.172."""


def _log1p(b: Builder, x: Value) -> Value:
    """With u = 1 + x, rounded: log(u) + (x - (u - 1)) / u."""
    one = constant(f32, 1.0)
    u = b.fadd(x, one)
    bits = b.bitcast(u, lanes_of(i32))
    power = b.ashr(b.sub(bits, constant(i32, _HALF_ROOT)), constant(i32, 23))
    m = b.bitcast(b.sub(bits, b.shl(power, constant(i32, 23))), lanes_of(f32))
    s = b.fdiv(b.fsub(m, one), b.fadd(m, one))
    square = b.fmul(s, s)
    p = constant(f32, _TERMS[0])
    for term in _TERMS[1:]:
        p = multiply_add(b, p, square, constant(f32, term))
    log = multiply_add(b, b.fmul(s, square), p, b.fadd(s, s))
    log = multiply_add(b, b.sitofp(power, lanes_of(f32)), constant(f32, math.log(2)), log)
    log = b.fadd(log, b.fdiv(b.fsub(x, b.fsub(u, one)), u))
    return b.select(b.fcmp_unordered("uno", x, x), x, log)


log1p = lanewise(_log1p, [F32x16], F32x16)
"""log(1 + x) for finite x >= 0, NaN of NaN; relative error below 3e-7."""


def _sqrt(b: Builder, x: Value) -> ir.Value:
    return call(b, "llvm.sqrt.v16f32", lanes_of(f32), [x])


sqrt = lanewise(_sqrt, [F32x16], F32x16)


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
