"""iq4_nl and iq4_xs of sixteen rows at a time, as ggml's `quantize_row_iq4_nl_impl` does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.iq4_nl import CODEBOOK, HALFWAY
from localkv.quant_formats.shared.cpu.quantizing import (
    CODES,
    ONE,
    SCALES,
    SMALLEST,
    above,
    both,
    clamped,
    extreme,
    floats,
    half_bits,
    integers,
    inverse,
    nearest_int,
    or_i32,
    put_code,
    put_floats,
    put_half,
    put_nibbles,
    shifted_left,
    shifted_right,
    sum_of_squares,
    weigh,
    weigh_by_squares,
)
from localkv.simd import LANES
from localkv.simd.arithmetic import (
    absolute,
    add,
    div,
    f32x16,
    mul,
    select,
    to_f32,
    zero_f32,
    zero_i32,
)
from localkv.simd.integer import add_i32, and_i32
from localkv.simd.kinds import Address, Builder, Lanes, Value
from localkv.simd.vector import F32x16, I32x16, constant, f32, i32, lanewise

TRIES = 7
"""Scales that are tried on either side of the one by which the largest magnitude is -127."""


def _nearest(b: Builder, x: Value, item: Any, values: list[int]) -> Value:
    """The one of 16 values that stands for the codebook's nearest; halfway, the upper."""
    found = constant(item, values[0])
    for twice, value in zip(HALFWAY, values[1:], strict=True):
        is_upper = b.fcmp_unordered(">=", x, constant(f32, twice / 2))
        found = b.select(is_upper, constant(item, value), found)
    return found


nearest_value = lanewise(lambda b, x: _nearest(b, x, f32, list(CODEBOOK)), [F32x16], F32x16)
nearest_code = lanewise(lambda b, x: _nearest(b, x, i32, list(range(16))), [F32x16], I32x16)


@njit
def _moments(x: Address, weights: Address, factor: Lanes) -> tuple[Lanes, Lanes]:
    products = squares = zero_f32()
    for i in range(32):
        value, weight = floats(x, i), floats(weights, i)
        q = nearest_value(mul(factor, value))
        products = add(products, mul(mul(weight, q), value))
        squares = add(squares, mul(mul(weight, q), q))
    return products, squares


@njit
def best_scale(x: Address, weights: Address) -> Lanes:
    """The scale of the least weighted error among those that are tried; 0 for zeros."""
    furthest, size = extreme(32, x)
    first = np.float32(CODEBOOK[0])
    factor = div(f32x16(ONE), div(mul(f32x16(np.float32(-1)), furthest), f32x16(first)))
    products, squares = _moments(x, weights, factor)
    d = select(above(squares, zero_f32()), div(products, squares), zero_f32())
    best = mul(d, products)
    for step in range(-TRIES, TRIES + 1):
        factor = div(f32x16(np.float32(step) + first), furthest)
        products, squares = _moments(x, weights, factor)
        better = both(
            above(squares, zero_f32()), above(mul(products, products), mul(best, squares))
        )
        d = select(better, div(products, squares), d)
        best = select(better, mul(d, products), best)
    return select(above(f32x16(SMALLEST), size), zero_f32(), d)


@njit
def put_codes(x: Address, factor: Lanes, codes: Address) -> None:
    for i in range(32):
        put_code(codes, i, nearest_code(mul(factor, floats(x, i))))


@njit
def put_iq4_nl(x: Address, d: Lanes, out: Address, scratch: Address) -> None:
    put_half(out, 0, half_bits(d))
    put_codes(x, inverse(d), scratch + CODES)
    put_nibbles(scratch + CODES, out + LANES * 2, 16, 16)


@njit
def encode(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    weigh_by_squares(32, x, scratch)
    put_iq4_nl(x, best_scale(x, scratch), out, scratch)


@njit
def encode_weighted(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    variance = mul(sum_of_squares(32, x, zero_f32()), f32x16(np.float32(2 / 32)))
    weigh(32, x, importance, variance, scratch)
    put_iq4_nl(x, best_scale(x, scratch), out, scratch)


@njit
def put_iq4_xs(x: Address, out: Address, scratch: Address) -> None:
    """Pack a super block whose groups have scales."""
    furthest = size = zero_f32()
    for j in range(8):
        scale = floats(scratch + SCALES, j)
        more = above(absolute(scale), size)
        size = select(more, absolute(scale), size)
        furthest = select(more, scale, furthest)
    d = div(mul(f32x16(np.float32(-1)), furthest), f32x16(np.float32(32)))
    put_half(out, 0, half_bits(d))
    factor = inverse(d)
    upper = low = zero_i32()
    for j in range(8):
        bits = clamped(nearest_int(mul(factor, floats(scratch + SCALES, j))), -32, 31)
        group = scratch + CODES + LANES * 32 * j
        put_codes(x + 4 * LANES * 32 * j, inverse(mul(d, to_f32(bits))), group)
        put_nibbles(group, out + LANES * (8 + 16 * j), 16, 16)
        bits = add_i32(bits, integers(32))
        upper = or_i32(upper, shifted_left(shifted_right(bits, 4), 2 * j))
        bits = and_i32(bits, integers(15))
        if j % 2 == 0:
            low = bits
        else:
            put_code(out, 4 + j // 2, or_i32(low, shifted_left(bits, 4)))
    put_half(out, 2, upper)


@njit
def encode_iq4_xs(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    for j in range(8):
        at = x + 4 * LANES * 32 * j
        weigh_by_squares(32, at, scratch)
        put_floats(scratch + SCALES, j, best_scale(at, scratch))
    put_iq4_xs(x, out, scratch)


@njit
def encode_weighted_iq4_xs(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    variance = mul(sum_of_squares(256, x, zero_f32()), f32x16(np.float32(2 / 256)))
    for j in range(8):
        at = x + 4 * LANES * 32 * j
        weigh(32, at, importance + 128 * j, variance, scratch)
        put_floats(scratch + SCALES, j, best_scale(at, scratch))
    put_iq4_xs(x, out, scratch)


iq4_xs = SimpleNamespace(encode=encode_iq4_xs, encode_weighted=encode_weighted_iq4_xs)
