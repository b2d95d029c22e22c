"""Lane-wise arithmetic, comparison and selection; sums and maxima over lanes; functions of floats.

exp and tanh stand on 2^x = 2^n 2^r, n an integer and r in [-1/2, 1/2]. There 2^r - 1 = r q(r), and
q is a polynomial of degree 5 with a relative error of 1.1e-8 (least squares, reweighted to
minimax).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from localkv.simd import LANES
from localkv.simd.cpu_features import HAS_AVX512
from localkv.simd.kinds import Args, Builder, Intrinsic, Signature, Target, Typing, Value
from localkv.simd.vector import (
    F32x16,
    I32x16,
    Mask16,
    call,
    constant,
    f32,
    i1,
    i16,
    i32,
    i64,
    lanes_of,
    lanewise,
    multiply_add,
    splat,
)

_F, _I, _M = F32x16, I32x16, Mask16

f32x16 = lanewise(splat, [types.float32], _F)
"""A float in all lanes."""
i32x16 = lanewise(splat, [types.int32], _I)
"""An integer in all lanes."""


def _maximum(builder: Builder, x: Value, y: Value) -> Value:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


add = lanewise(lambda b, x, y: b.fadd(x, y), [_F, _F], _F)
sub = lanewise(lambda b, x, y: b.fsub(x, y), [_F, _F], _F)
mul = lanewise(lambda b, x, y: b.fmul(x, y), [_F, _F], _F)
div = lanewise(lambda b, x, y: b.fdiv(x, y), [_F, _F], _F)
maximum = lanewise(_maximum, [_F, _F], _F)
"""The larger; the second where one is NaN."""
if_positive = lanewise(
    lambda b, x, y, z: b.select(b.fcmp_ordered(">", x, constant(f32, 0.0)), y, z), [_F, _F, _F], _F
)
"""y where x > 0, else z."""
absolute = lanewise(lambda b, x: call(b, "llvm.fabs.v16f32", _F.llvm, [x]), [_F], _F)
fma = lanewise(multiply_add, [_F, _F, _F], _F)
"""x * y + z."""
nearest = lanewise(lambda b, x: call(b, "llvm.rint.v16f32", _F.llvm, [x]), [_F], _F)
"""Rounded to an integer, ties to even."""

to_f32 = lanewise(lambda b, x: b.sitofp(x, lanes_of(f32)), [_I], _F)
to_i32 = lanewise(lambda b, x: b.fptosi(x, lanes_of(i32)), [_F], _I)


def nearest_integers(builder: Builder, x: Value) -> Value:
    """The code of `nearest_i32`."""
    if not HAS_AVX512:
        return builder.fptosi(call(builder, "llvm.rint.v16f32", _F.llvm, [x]), lanes_of(i32))
    every_lane, as_set = ir.Constant(i16, -1), ir.Constant(i32, 4)
    args = [x, constant(i32, 0), every_lane, as_set]
    return call(builder, "llvm.x86.avx512.mask.cvtps2dq.512", _I.llvm, args)


nearest_i32 = lanewise(nearest_integers, [_F], _I)
"""Rounded to an integer, ties to even; of what has none, any."""

float_bits = lanewise(lambda b, x: b.zext(b.bitcast(x, i32), i64), [types.float32], types.int64)
"""The bits of one float, as an integer from 0 on."""
bits_float = lanewise(lambda b, x: b.bitcast(b.trunc(x, i32), f32), [types.int64], types.float32)

select = lanewise(lambda b, mask, x, y: b.select(mask, x, y), [_M, _F, _F], _F)
"""x where the mask is set, else y; the other's NaN does no harm."""
select_i32 = lanewise(lambda b, mask, x, y: b.select(mask, x, y), [_M, _I, _I], _I)


def _lanes_below(builder: Builder, n: Value) -> Value:
    numbers = ir.Constant(lanes_of(i32), list(range(LANES)))
    return builder.icmp_signed("<", numbers, splat(builder, builder.trunc(n, i32)))


def _any_above(builder: Builder, x: Value, y: Value) -> Value:
    bits = builder.bitcast(builder.fcmp_ordered(">", x, y), i16)
    return builder.icmp_unsigned("!=", bits, ir.Constant(i16, 0))


def _first_lane(builder: Builder, mask: Value) -> Value:
    bits = builder.or_(builder.zext(builder.bitcast(mask, i16), i64), ir.Constant(i64, 1 << LANES))
    return builder.cttz(bits, ir.Constant(i1, 1))


at_least = lanewise(lambda b, x, y: b.fcmp_ordered(">=", x, y), [_F, _F], _M)
"""The mask of lanes where x >= y."""
first_lane = lanewise(_first_lane, [_M], types.intp)
"""The first lane that is set, or 16 if there is none."""
any_above = lanewise(_any_above, [_F, _F], types.boolean)
"""Whether x > y in any lane."""

lanes_below = lanewise(_lanes_below, [types.intp], _M)
"""The mask of lanes 0 to n - 1."""


def _exp(builder: Builder, x: Value) -> Value:
    """exp(x) = 2^n 2^f for x <= 88, f in [-1/2, 1/2]; 0 from about -87 on; error below 2e-7.

    The exponent is reduced in two steps (Cody and Waite), 2^f is a polynomial (Cephes' `expf`).
    """
    x = _maximum(builder, x, constant(f32, -88.0))
    n = call(builder, "llvm.rint.v16f32", _F.llvm, [builder.fmul(x, constant(f32, 1.44269504089))])
    r = multiply_add(builder, n, constant(f32, -0.693359375), x)
    r = multiply_add(builder, n, constant(f32, 2.12194440e-4), r)
    p = constant(f32, 1.9875691500e-4)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        p = multiply_add(builder, p, r, constant(f32, term))
    one_more = builder.fadd(r, constant(f32, 1.0))
    p = multiply_add(builder, builder.fmul(r, r), p, one_more)
    exponent = builder.add(builder.fptosi(n, lanes_of(i32)), constant(i32, 127))
    scale = builder.bitcast(builder.shl(exponent, constant(i32, 23)), lanes_of(f32))
    return builder.fmul(p, scale)


exp = lanewise(_exp, [_F], _F)


def folded(builder: Builder, x: Value, combine: Callable[[Any, Any, Any], Any]) -> Value:
    """Half of a vector's lanes combined with the other half, until one is left."""
    n = LANES
    while n > 1:
        n //= 2
        low, high = (
            builder.shuffle_vector(x, x, ir.Constant(lanes_of(i32, n), list(range(at, at + n))))
            for at in (0, n)
        )
        x = combine(builder, low, high)
    return builder.extract_element(x, ir.Constant(i32, 0))


def folded_sum(builder: Builder, x: Value) -> Value:
    """The sum of a vector's lanes, half of them added to the other half until one is left."""
    return folded(builder, x, lambda b, low, high: b.fadd(low, high))


sum_lanes = lanewise(folded_sum, [_F], types.float32)


def integer_sum(builder: Builder, x: Value) -> Value:
    """The sum of a vector's integers."""
    return call(builder, "llvm.vector.reduce.add.v16i32", i32, [x])


sum_lanes_i32 = lanewise(integer_sum, [_I], types.int32)
max_lanes = lanewise(lambda b, x: folded(b, x, _maximum), [_F], types.float32)


def larger_magnitude(builder: Builder, x: Value, y: Value) -> Value:
    """The larger of |x| and y, which is not negative; NaN of NaN, as its bits are the largest."""
    absolute = call(builder, f"llvm.fabs.v{x.type.count}f32", x.type, [x])
    bits = [builder.bitcast(v, lanes_of(i32, x.type.count)) for v in (absolute, y)]
    largest = call(builder, f"llvm.smax.v{x.type.count}i32", bits[0].type, bits)
    return builder.bitcast(largest, x.type)


def largest_lane(builder: Builder, x: Value) -> Value:
    """The largest of floats that are not negative; NaN of NaN."""
    bits = builder.bitcast(x, lanes_of(i32))
    return builder.bitcast(call(builder, "llvm.vector.reduce.smax.v16i32", i32, [bits]), f32)


larger_magnitudes = lanewise(larger_magnitude, [_F, _F], _F)
largest_of_lanes = lanewise(largest_lane, [_F], types.float32)


@intrinsic
def zero_f32(typing: Typing) -> Intrinsic:
    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        return constant(f32, 0.0)

    return F32x16(), generate


@intrinsic
def zero_i32(typing: Typing) -> Intrinsic:
    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        return constant(i32, 0)

    return I32x16(), generate


_Q = (1.5403512e-4, 1.33907353e-3, 9.61823761e-3, 5.55035733e-2, 2.40226492e-1, 6.93147182e-1)
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
"""Coefficients of log((1 + s) / (1 - s)) / s - 2 in powers of s^2, the highest first;
|s| < 0.172."""


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
    # the last bit of this number counts as much as a small half's
    number = constant(f32, 0.75)
    small = b.fsub(b.fadd(x, number), number)
    size = call(b, "llvm.fabs.v16f32", lanes_of(f32), [x])
    y = b.select(b.fcmp_ordered("<", size, constant(f32, SMALLEST_NORMAL)), small, normal)
    return b.select(b.fcmp_unordered("uno", x, x), x, y)


rounded_to_half = lanewise(_rounded_to_half, [F32x16], F32x16)
"""The nearest half, ties to even, as a float; larger ones become the largest, NaN stays."""
