"""The logarithm of 1 + x, and square roots, lane by lane."""

from __future__ import annotations

import math

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
