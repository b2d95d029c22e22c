"""Sixteen rows of weights at a time become blocks of a type: the steps that types share.

A lane is a row. Each lane does what ggml's scalar code does with that row, operation for operation
in the same order and without fused multiplications, so the bytes are llama.cpp's. `x`, `weights`
and the like are addresses of vectors, one after the other: value 0 of all rows, value 1, ...
Codes are bytes, 16 for each value. Importance is one float for each column, the same in all rows.

The searches for scales are ggml-quants.c's: `make_qx_quants` (`symmetric_scale`),
`make_qkx2_quants` and `make_qkx3_quants` (`affine_scale`), `make_q3_quants` (`refined_scale`),
`make_qp_quants` (`positive_scale`).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types

from localkv.simd import LANES
from localkv.simd.arithmetic import (
    absolute,
    add,
    at_least,
    div,
    f32x16,
    i32x16,
    maximum,
    mul,
    select,
    select_i32,
    sqrt,
    sub,
    to_f32,
    to_i32,
    zero_f32,
    zero_i32,
)
from localkv.simd.integer import add_i32, and_i32, shift_left, shift_right
from localkv.simd.kinds import Address, Builder, Float, Lanes, Value
from localkv.simd.memory import (
    broadcast_f32,
    half_bits_to_float,
    load_f32,
    load_u8,
    store_f32,
    store_low_bytes,
)
from localkv.simd.vector import (
    F32x16,
    I32x16,
    Mask16,
    call,
    constant,
    f32,
    i16,
    i32,
    lanes_of,
    lanewise,
)

SMALLEST = np.float32(1e-15)
"""A group whose values are all nearer to 0 becomes zeros (ggml's `GROUP_MAX_EPS`)."""
ZERO, HALF, ONE, TWO = np.float32(0), np.float32(0.5), np.float32(1), np.float32(2)
BELOW_HALF = np.float32(0.5 - 2**-25)
LARGEST_FLOAT = np.float32(3.4028234663852886e38)

_F, _I, _M = F32x16, I32x16, Mask16
_NUMBER = 12582912.0
"""1.5 * 2^23: added to a float, it leaves an integer in the lowest 22 bits."""


def _nearest_int(b: Builder, x: Value) -> Value:
    bits = b.bitcast(b.fadd(x, constant(f32, _NUMBER)), lanes_of(i32))
    return b.sub(b.and_(bits, constant(i32, 0x7FFFFF)), constant(i32, 0x400000))


def _half_bits(b: Builder, x: Value) -> Value:
    """Twice the float, as an integer, tells the exponent; a sum with a power of two rounds."""
    bits = b.bitcast(x, lanes_of(i32))
    sign = b.lshr(b.and_(bits, constant(i32, -(1 << 31))), constant(i32, 16))
    twice = b.shl(bits, constant(i32, 1))
    size = call(b, "llvm.fabs.v16f32", lanes_of(f32), [x])
    size = b.fmul(b.fmul(size, constant(f32, 2.0**112)), constant(f32, 2.0**-110))
    bias = b.and_(twice, constant(i32, -(1 << 24)))
    least = constant(i32, 0x71000000)
    bias = b.select(b.icmp_unsigned("<", bias, least), least, bias)
    bias = b.add(b.lshr(bias, constant(i32, 1)), constant(i32, 0x07800000))
    rounded = b.bitcast(b.fadd(b.bitcast(bias, lanes_of(f32)), size), lanes_of(i32))
    exponent = b.and_(b.lshr(rounded, constant(i32, 13)), constant(i32, 0x7C00))
    magnitude = b.add(exponent, b.and_(rounded, constant(i32, 0xFFF)))
    is_nan = b.icmp_unsigned(">", twice, constant(i32, -(1 << 24)))
    return b.or_(sign, b.select(is_nan, constant(i32, 0x7E00), magnitude))


def _any_lane(b: Builder, mask: Value) -> Value:
    return b.icmp_unsigned("!=", b.bitcast(mask, i16), ir.Constant(i16, 0))


nearest_int = lanewise(_nearest_int, [_F], _I)
"""The nearest integer, ties to even; of what is beyond +-2^22, what ggml's `nearest_int` gives."""
half_bits = lanewise(_half_bits, [_F], _I)
"""The bits of the nearest halves, infinity above 65504, as ggml's `ggml_compute_fp32_to_fp16`."""
half_value = lanewise(lambda b, x: half_bits_to_float(b, b.trunc(x, lanes_of(i16))), [_I], _F)
"""The floats of the bits of halves."""
above = lanewise(lambda b, x, y: b.fcmp_ordered(">", x, y), [_F, _F], _M)
differs = lanewise(lambda b, x, y: b.fcmp_unordered("!=", x, y), [_F, _F], _M)
"""Whether x != y, or one is NaN."""
same_i32 = lanewise(lambda b, x, y: b.icmp_signed("==", x, y), [_I, _I], _M)
above_i32 = lanewise(lambda b, x, y: b.icmp_signed(">", x, y), [_I, _I], _M)
both = lanewise(lambda b, x, y: b.and_(x, y), [_M, _M], _M)
either = lanewise(lambda b, x, y: b.or_(x, y), [_M, _M], _M)
without = lanewise(lambda b, x, y: b.and_(x, b.not_(y)), [_M, _M], _M)
"""Lanes of the first mask that are not in the second."""
any_lane = lanewise(_any_lane, [_M], types.boolean)
or_i32 = lanewise(lambda b, x, y: b.or_(x, y), [_I, _I], _I)
sub_i32 = lanewise(lambda b, x, y: b.sub(x, y), [_I, _I], _I)
least_i32 = lanewise(lambda b, x, y: b.select(b.icmp_signed("<", x, y), x, y), [_I, _I], _I)
largest_i32 = lanewise(lambda b, x, y: b.select(b.icmp_signed(">", x, y), x, y), [_I, _I], _I)


@njit
def floats(base: Address, i: int) -> Lanes:
    """Value i of all rows."""
    return load_f32(base, LANES * i)


@njit
def put_floats(base: Address, i: int, value: Lanes) -> None:
    store_f32(base, LANES * i, value)


@njit
def code(codes: Address, i: int) -> Lanes:
    """Byte i of all rows, as integers from 0 to 255."""
    return load_u8(codes, LANES * i)


@njit
def put_code(codes: Address, i: int, value: Lanes) -> None:
    """The lowest bytes of integers."""
    store_low_bytes(codes, LANES * i, value)


@njit
def put_half(out: Address, i: int, bits: Lanes) -> None:
    """Bits of halves as bytes i and i + 1."""
    put_code(out, i, bits)
    put_code(out, i + 1, shift_right(bits, i32x16(np.int32(8))))


@njit
def integers(value: int) -> Lanes:
    """An integer in all lanes."""
    return i32x16(np.int32(value))


@njit
def clamped(value: Lanes, low: int, high: int) -> Lanes:
    return largest_i32(integers(low), least_i32(integers(high), value))


@njit
def shifted_left(value: Lanes, n_bits: int) -> Lanes:
    return shift_left(value, integers(n_bits))


@njit
def shifted_right(value: Lanes, n_bits: int) -> Lanes:
    return shift_right(value, integers(n_bits))


@njit
def inverse(d: Lanes) -> Lanes:
    """1 / d, or 0 where d is 0."""
    return select(differs(d, zero_f32()), div(f32x16(ONE), d), zero_f32())


@njit
def rounded(y: Lanes) -> Lanes:
    """To the nearest integer, halves away from 0, as C's `roundf`."""
    size = to_i32(add(absolute(y), f32x16(BELOW_HALF)))
    return select_i32(at_least(y, zero_f32()), size, sub_i32(zero_i32(), size))


@njit
def extreme(n: int, x: Address) -> Lanes:
    """The value that is furthest from 0, the first of several, and its magnitude."""
    furthest = size = zero_f32()
    for i in range(n):
        value = floats(x, i)
        more = above(absolute(value), size)
        size = select(more, absolute(value), size)
        furthest = select(more, value, furthest)
    return furthest, size


@njit
def least_and_largest(n: int, x: Address) -> tuple[Lanes, Lanes]:
    """The least and the largest value, the first of several equal ones."""
    low, high = f32x16(LARGEST_FLOAT), f32x16(-LARGEST_FLOAT)
    for i in range(n):
        value = floats(x, i)
        low = select(above(low, value), value, low)
        high = select(above(value, high), value, high)
    return low, high


@njit
def sum_of_squares(n: int, x: Address, total: Lanes) -> Lanes:
    """The squares added to `total`, one after the other."""
    for i in range(n):
        value = floats(x, i)
        total = add(total, mul(value, value))
    return total


@njit
def weigh(n: int, x: Address, importance: Address, variance: Lanes, weights: Address) -> Lanes:
    """Each column's importance times sqrt(variance + x^2) to `weights`; their sum in each row."""
    total = zero_f32()
    for i in range(n):
        value = floats(x, i)
        size = sqrt(add(variance, mul(value, value)))
        weight = mul(broadcast_f32(importance, i), size)
        put_floats(weights, i, weight)
        total = add(total, weight)
    return total


@njit
def weigh_by_squares(n: int, x: Address, weights: Address) -> Lanes:
    """x^2 to `weights`; their sum."""
    total = zero_f32()
    for i in range(n):
        value = floats(x, i)
        weight = mul(value, value)
        put_floats(weights, i, weight)
        total = add(total, weight)
    return total


@njit
def weigh_by_importance(n: int, importance: Address, weights: Address) -> None:
    """Each column's importance to `weights`."""
    for i in range(n):
        put_floats(weights, i, broadcast_f32(importance, i))


@njit
def _moments(
    n: int, bound: int, x: Address, weights: Address, factor: Lanes
) -> tuple[Lanes, Lanes]:
    """The sums of weight x code and weight code code; a factor gives codes, -bound to bound - 1."""
    products = squares = zero_f32()
    for i in range(n):
        value, weight = floats(x, i), floats(weights, i)
        level = to_f32(clamped(nearest_int(mul(factor, value)), -bound, bound - 1))
        products = add(products, mul(mul(weight, value), level))
        squares = add(squares, mul(mul(weight, level), level))
    return products, squares


@njit
def symmetric_scale(n: int, bound: int, x: Address, weights: Address, codes: Address) -> Lanes:
    """The best of 19 scales of codes 0 to 2 bound - 1, which stand for code - bound."""
    furthest, size = extreme(n, x)
    is_zero = above(f32x16(SMALLEST), size)
    factor = div(f32x16(np.float32(-bound)), furthest)
    products, squares = _moments(n, bound, x, weights, factor)
    scale = select(differs(squares, zero_f32()), div(products, squares), zero_f32())
    best = mul(scale, products)
    for step in range(-9, 10):
        if step == 0:
            continue
        steps = np.float32(bound) + np.float32(0.1) * np.float32(step)
        other = div(f32x16(-steps), furthest)
        products, squares = _moments(n, bound, x, weights, other)
        better = both(
            above(squares, zero_f32()), above(mul(products, products), mul(best, squares))
        )
        scale = select(better, div(products, squares), scale)
        best = select(better, mul(scale, products), best)
        factor = select(better, other, factor)
    for i in range(n):
        level = clamped(nearest_int(mul(factor, floats(x, i))), -bound, bound - 1)
        put_code(codes, i, select_i32(is_zero, zero_i32(), add_i32(level, integers(bound))))
    return select(is_zero, zero_f32(), scale)


@njit
def _level(value: Lanes, low: Lanes, factor: Lanes, last: int) -> Lanes:
    return to_f32(clamped(nearest_int(mul(factor, sub(value, low))), 0, last))


@njit
def affine_scale(
    n: int,
    last: int,
    x: Address,
    weights: Address,
    codes: Address,
    first_step: Float,
    step: Float,
    n_steps: int,
    by_magnitude: bool,
) -> tuple[Lanes, Lanes]:
    """The best of some scales and minima of codes 0 to `last`, and the minimum's negative.

    Args:
        first_step, step, n_steps: of the scales that are tried.
        by_magnitude: errors count by their magnitude, not by their square.
    """
    low = high = floats(x, 0)
    weight_sum = floats(weights, 0)
    x_sum = mul(weight_sum, low)
    for i in range(1, n):
        value, weight = floats(x, i), floats(weights, i)
        low = select(above(low, value), value, low)
        high = select(above(value, high), value, high)
        weight_sum = add(weight_sum, weight)
        x_sum = add(x_sum, mul(weight, value))
    low = select(above(low, zero_f32()), zero_f32(), low)
    is_flat = at_least(low, high)
    flat_low = low
    factor = div(f32x16(np.float32(last)), sub(high, low))
    scale = div(f32x16(ONE), factor)
    best = _error(n, last, x, weights, low, factor, scale, low, by_magnitude)
    used_low, used_factor = low, factor
    for i in range(n_steps + 1):
        numerator = np.float32(first_step) + np.float32(step) * np.float32(i) + np.float32(last)
        other = div(f32x16(numerator), sub(high, low))
        l_sum = squares = products = zero_f32()
        for j in range(n):
            value = floats(x, j)
            level = _level(value, low, other, last)
            weighted = mul(floats(weights, j), level)
            l_sum = add(l_sum, weighted)
            squares = add(squares, mul(weighted, level))
            products = add(products, mul(weighted, value))
        determinant = sub(mul(weight_sum, squares), mul(l_sum, l_sum))
        is_solved = above(determinant, zero_f32())
        if any_lane(is_solved):
            new_scale = sub(mul(weight_sum, products), mul(x_sum, l_sum))
            new_scale = div(new_scale, determinant)
            new_low = sub(mul(squares, x_sum), mul(l_sum, products))
            new_low = div(new_low, determinant)
            is_positive = above(new_low, zero_f32())
            new_low = select(is_positive, zero_f32(), new_low)
            new_scale = select(is_positive, div(products, squares), new_scale)
            error = _error(n, last, x, weights, low, other, new_scale, new_low, by_magnitude)
            better = both(is_solved, above(best, error))
            used_low = select(better, low, used_low)
            used_factor = select(better, other, used_factor)
            best = select(better, error, best)
            scale = select(better, new_scale, scale)
            low = select(better, new_low, low)
    for i in range(n):
        level = clamped(nearest_int(mul(used_factor, sub(floats(x, i), used_low))), 0, last)
        put_code(codes, i, select_i32(is_flat, zero_i32(), level))
    low = select(is_flat, flat_low, low)
    return select(is_flat, zero_f32(), scale), mul(f32x16(-ONE), low)


@njit
def _error(
    n: int,
    last: int,
    x: Address,
    weights: Address,
    code_low: Lanes,
    factor: Lanes,
    scale: Lanes,
    low: Lanes,
    by_magnitude: bool,
) -> Lanes:
    """The weighted sum of errors of the codes that `code_low` and `factor` give."""
    total = zero_f32()
    for i in range(n):
        value = floats(x, i)
        level = _level(value, code_low, factor, last)
        error = sub(add(mul(scale, level), low), value)
        error = absolute(error) if by_magnitude else mul(error, error)
        total = add(total, mul(floats(weights, i), error))
    return total


REFINEMENTS = 5


@njit
def refined_scale(n: int, bound: int, x: Address, levels: Address, codes: Address) -> Lanes:
    """A scale whose codes, 0 to 2 bound - 1, are changed one by one while the error shrinks.

    Errors are weighted with x^2. `levels` is room for n vectors.
    """
    furthest, size = extreme(n, x)
    is_zero = above(f32x16(SMALLEST), size)
    factor = div(f32x16(np.float32(-bound)), furthest)
    products = squares = zero_f32()
    for i in range(n):
        value = floats(x, i)
        level = to_f32(clamped(nearest_int(mul(factor, value)), -bound, bound - 1))
        put_floats(levels, i, level)
        weight = mul(value, value)
        products = add(products, mul(mul(weight, value), level))
        squares = add(squares, mul(mul(weight, level), level))
    for _ in range(REFINEMENTS):
        changed = False
        for i in range(n):
            value = floats(x, i)
            weight = mul(value, value)
            level = floats(levels, i)
            p = sub(products, mul(mul(weight, value), level))
            s = sub(squares, mul(mul(weight, level), level))
            new = clamped(nearest_int(div(mul(value, s), p)), -bound, bound - 1)
            new = to_f32(new)
            candidate = both(above(p, zero_f32()), differs(new, level))
            p = add(p, mul(mul(weight, value), new))
            s = add(s, mul(mul(weight, new), new))
            gain = above(mul(mul(p, p), squares), mul(mul(products, products), s))
            better = both(candidate, both(above(s, zero_f32()), gain))
            if any_lane(without(better, is_zero)):
                changed = True
                put_floats(levels, i, select(better, new, level))
                products = select(better, p, products)
                squares = select(better, s, squares)
        if not changed:
            break
    for i in range(n):
        level = add_i32(to_i32(floats(levels, i)), integers(bound))
        put_code(codes, i, select_i32(is_zero, zero_i32(), level))
    scale = select(above(squares, zero_f32()), div(products, squares), zero_f32())
    return select(is_zero, zero_f32(), scale)


@njit
def _weighted_squares(n: int, last: int, x: Address, weights: Address, factor: Lanes) -> Lanes:
    scale = div(f32x16(ONE), factor)
    total = zero_f32()
    for i in range(n):
        value = floats(x, i)
        level = least_i32(integers(last), nearest_int(mul(factor, value)))
        error = sub(value, mul(scale, to_f32(level)))
        total = add(total, mul(mul(floats(weights, i), error), error))
    return total


@njit
def positive_scale(n: int, last: int, x: Address, weights: Address, codes: Address) -> Lanes:
    """A scale of values from 0 on, whose codes, 0 to `last`, are changed while the error shrinks.

    Values are the scales or minima of a super block's groups.
    """
    high = zero_f32()
    for i in range(n):
        high = maximum(high, floats(x, i))
    is_zero = above(f32x16(SMALLEST), high)
    factor = div(f32x16(np.float32(last)), high)
    scale = div(f32x16(ONE), factor)
    best = zero_f32()
    for i in range(n):
        value = floats(x, i)
        level = and_i32(nearest_int(mul(factor, value)), integers(255))
        error = sub(value, mul(scale, to_f32(level)))
        best = add(best, mul(mul(floats(weights, i), error), error))
    for step in range(-4, 5):
        if step == 0:
            continue
        steps = np.float32(0.1) * np.float32(step) + np.float32(last)
        other = div(f32x16(steps), high)
        error = _weighted_squares(n, last, x, weights, other)
        better = above(best, error)
        best = select(better, error, best)
        factor = select(better, other, factor)
    products = squares = zero_f32()
    for i in range(n):
        value, weight = floats(x, i), floats(weights, i)
        level = least_i32(integers(last), nearest_int(mul(factor, value)))
        put_code(codes, i, level)
        products = add(products, mul(mul(weight, value), to_f32(level)))
        squares = add(squares, mul(mul(weight, to_f32(level)), to_f32(level)))
    for _ in range(REFINEMENTS):
        changed = False
        for i in range(n):
            value, weight = floats(x, i), floats(weights, i)
            before = code(codes, i)
            level = to_f32(before)
            p = sub(products, mul(mul(weight, value), level))
            s = sub(squares, mul(mul(weight, level), level))
            positive = both(above(p, zero_f32()), above(s, zero_f32()))
            new = least_i32(integers(last), nearest_int(div(mul(value, s), p)))
            level = to_f32(new)
            p = add(p, mul(mul(weight, value), level))
            s = add(s, mul(mul(weight, level), level))
            gain = above(mul(mul(p, p), squares), mul(mul(products, products), s))
            better = without(both(positive, gain), same_i32(new, before))
            if any_lane(without(better, is_zero)):
                changed = True
                put_code(codes, i, select_i32(better, new, before))
                products = select(better, p, products)
                squares = select(better, s, squares)
        if not changed:
            break
    for i in range(n):
        put_code(codes, i, select_i32(is_zero, zero_i32(), code(codes, i)))
    scale = select(above(squares, zero_f32()), div(products, squares), zero_f32())
    return select(is_zero, zero_f32(), scale)


@njit
def code_symmetrically(x: Address, bound: int, codes: Address) -> Lanes:
    """Codes of 32 values, the one that is furthest from 0 being 0; d (`quantize_row_q4_0_ref`)."""
    furthest, _ = extreme(32, x)
    d = div(furthest, f32x16(np.float32(-bound)))
    factor = inverse(d)
    for i in range(32):
        shifted = add(mul(floats(x, i), factor), f32x16(np.float32(bound) + HALF))
        put_code(codes, i, least_i32(integers(2 * bound - 1), to_i32(shifted)))
    return d


@njit
def code_affinely(x: Address, last: int, codes: Address) -> tuple[Lanes, Lanes]:
    """Codes of 32 values from the least to the largest; d and m (`quantize_row_q4_1_ref`)."""
    low, high = least_and_largest(32, x)
    d = div(sub(high, low), f32x16(np.float32(last)))
    factor = inverse(d)
    for i in range(32):
        shifted = add(mul(sub(floats(x, i), low), factor), f32x16(HALF))
        put_code(codes, i, least_i32(integers(last), to_i32(shifted)))
    return d, low


@njit
def put_nibbles(codes: Address, out: Address, n: int, distance: int) -> None:
    """n bytes of two codes: i and i + distance."""
    for i in range(n):
        put_code(out, i, or_i32(code(codes, i), shifted_left(code(codes, i + distance), 4)))


GROUPS = 16
"""The most groups of a super block."""
LARGEST_GROUP, LARGEST_BLOCK = 32, 256
_VECTOR_BYTES = 4 * LANES
LEVELS = LARGEST_GROUP * _VECTOR_BYTES
SCALES = 2 * LEVELS
MINIMA = SCALES + GROUPS * _VECTOR_BYTES
SUMS = MINIMA + GROUPS * _VECTOR_BYTES
SCALE_CODES = SUMS + GROUPS * _VECTOR_BYTES
MINIMUM_CODES = SCALE_CODES + GROUPS * LANES
CODES = MINIMUM_CODES + GROUPS * LANES
SCRATCH_BYTES = CODES + LARGEST_BLOCK * LANES
"""Where in an encoder's scratch memory things are. The weights of a group come first, then levels,
and the scales and minima of a super block's groups. Then come the sums of their weights, the codes
of both, and the codes of the block's values."""
