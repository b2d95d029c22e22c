"""K-quants of sixteen rows at a time, as ggml-quants.c's `quantize_row_q*_K_ref` and `_impl` do."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import njit

from localkv.quant_formats.shared.cpu.quantizing import (
    CODES,
    LEVELS,
    MINIMA,
    MINIMUM_CODES,
    ONE,
    SCALE_CODES,
    SCALES,
    SMALLEST,
    SUMS,
    above,
    affine_scale,
    clamped,
    code,
    differs,
    floats,
    half_bits,
    half_value,
    integers,
    least_i32,
    nearest_int,
    or_i32,
    positive_scale,
    put_code,
    put_floats,
    put_half,
    put_nibbles,
    refined_scale,
    shifted_left,
    shifted_right,
    sub_i32,
    sum_of_squares,
    symmetric_scale,
    weigh,
    weigh_by_importance,
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
    select_i32,
    sqrt,
    to_f32,
    zero_f32,
    zero_i32,
)
from localkv.simd.integer import add_i32, and_i32
from localkv.simd.kinds import Address, Lanes

BLOCK = 256
VECTOR = 4 * LANES


@njit
def mean_square(x: Address, times: float) -> Lanes:
    """`times` the mean square of a super block's values."""
    total = mul(f32x16(np.float32(times)), sum_of_squares(BLOCK, x, zero_f32()))
    return div(total, f32x16(np.float32(BLOCK)))


@njit
def round_group(n: int, last: int, x: Address, codes: Address, d: Lanes, m: Lanes) -> None:
    """The codes of a group's values for its final scale and minimum; they stay where d is 0."""
    has_scale = differs(d, zero_f32())
    for i in range(n):
        level = clamped(nearest_int(div(add(floats(x, i), m), d)), 0, last)
        put_code(codes, i, select_i32(has_scale, level, code(codes, i)))


@njit
def round_symmetric_group(x: Address, bound: int, codes: Address, d: Lanes) -> None:
    """`round_group` for 16 values without a minimum, whose codes stand for code - bound."""
    has_scale = differs(d, zero_f32())
    for i in range(16):
        level = clamped(nearest_int(div(floats(x, i), d)), -bound, bound - 1)
        level = add_i32(level, integers(bound))
        put_code(codes, i, select_i32(has_scale, level, code(codes, i)))


@njit
def put_two_bits(codes: Address, out: Address) -> None:
    """64 bytes of four codes each, 32 values apart."""
    for half in range(2):
        for i in range(32):
            byte = zero_i32()
            for j in range(4):
                bits = code(codes, 128 * half + 32 * j + i)
                byte = or_i32(byte, shifted_left(bits, 2 * j))
            put_code(out, 32 * half + i, byte)


@njit
def search_affine(
    x: Address,
    scratch: Address,
    n: int,
    last: int,
    first_step: float,
    step: float,
    n_steps: int,
    by_magnitude: bool,
    j: int,
) -> None:
    """The scale and minimum of group j, of n values whose weights are known."""
    scale, minimum = affine_scale(
        n,
        last,
        x + VECTOR * n * j,
        scratch,
        scratch + CODES + LANES * n * j,
        first_step,
        step,
        n_steps,
        by_magnitude,
    )
    put_floats(scratch + SCALES, j, scale)
    put_floats(scratch + MINIMA, j, minimum)


@njit
def code_scales(values: Address, codes: Address, n: int, last: int) -> Lanes:
    """Codes of scales or minima, the largest of which has the last one; the scale of the codes."""
    largest = zero_f32()
    for j in range(n):
        value = floats(values, j)
        largest = select(above(value, largest), value, largest)
    has_any = above(largest, zero_f32())
    factor = select(has_any, div(f32x16(np.float32(last)), largest), zero_f32())
    for j in range(n):
        put_code(codes, j, nearest_int(mul(factor, floats(values, j))))
    return select(has_any, div(largest, f32x16(np.float32(last))), zero_f32())


@njit
def put_q2(x: Address, d: Lanes, m: Lanes, out: Address, scratch: Address) -> None:
    """Pack a block of q2_K whose scales have codes."""
    d_bits, m_bits = half_bits(d), half_bits(m)
    put_half(out, 80, d_bits)
    put_half(out, 82, m_bits)
    d, m = half_value(d_bits), half_value(m_bits)
    for j in range(16):
        upper = shifted_left(code(scratch + MINIMUM_CODES, j), 4)
        put_code(out, j, or_i32(code(scratch + SCALE_CODES, j), upper))
        byte = code(out, j)
        group_d = mul(d, to_f32(and_i32(byte, integers(15))))
        group_m = mul(m, to_f32(shifted_right(byte, 4)))
        codes = scratch + CODES + LANES * 16 * j
        round_group(16, 3, x + VECTOR * 16 * j, codes, group_d, group_m)
    put_two_bits(scratch + CODES, out + LANES * 16)


@njit
def encode_q2(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    for j in range(16):
        for i in range(16):
            put_floats(scratch, i, absolute(floats(x, 16 * j + i)))
        search_affine(x, scratch, 16, 3, -0.5, 0.1, 15, True, j)
    d = code_scales(scratch + SCALES, scratch + SCALE_CODES, 16, 15)
    m = code_scales(scratch + MINIMA, scratch + MINIMUM_CODES, 16, 15)
    put_q2(x, d, m, out, scratch)


@njit
def encode_weighted_q2(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    variance = mean_square(x, 1.0)
    for j in range(16):
        total = weigh(16, x + VECTOR * 16 * j, importance + 64 * j, variance, scratch)
        put_floats(scratch + SUMS, j, total)
        search_affine(x, scratch, 16, 3, -0.9, 0.05, 36, False, j)
    weights = scratch + SUMS
    d = positive_scale(16, 15, scratch + SCALES, weights, scratch + SCALE_CODES)
    m = positive_scale(16, 15, scratch + MINIMA, weights, scratch + MINIMUM_CODES)
    put_q2(x, d, m, out, scratch)


@njit
def put_q3(x: Address, d: Lanes, out: Address, scratch: Address) -> None:
    """Pack a block of q3_K whose scales have codes, 0 to 63."""
    d_bits = half_bits(d)
    put_half(out, 108, d_bits)
    d = half_value(d_bits)
    scales = out + LANES * 96
    for j in range(4):
        upper = zero_i32()
        for part in range(4):
            level = shifted_right(code(scratch + SCALE_CODES, 4 * part + j), 4)
            upper = or_i32(upper, shifted_left(level, 2 * part))
        put_code(scales, 8 + j, upper)
    for j in range(8):
        low = and_i32(code(scratch + SCALE_CODES, j), integers(15))
        high = shifted_left(and_i32(code(scratch + SCALE_CODES, j + 8), integers(15)), 4)
        put_code(scales, j, or_i32(low, high))
    for j in range(16):
        scale = to_f32(sub_i32(code(scratch + SCALE_CODES, j), integers(32)))
        codes = scratch + CODES + LANES * 16 * j
        round_symmetric_group(x + VECTOR * 16 * j, 4, codes, mul(d, scale))
    codes = scratch + CODES
    for i in range(32):
        mask = zero_i32()
        for j in range(8):
            bit = shifted_right(code(codes, 32 * j + i), 2)
            mask = or_i32(mask, shifted_left(and_i32(bit, integers(1)), j))
        put_code(out, i, mask)
    for i in range(BLOCK):
        put_code(codes, i, and_i32(code(codes, i), integers(3)))
    put_two_bits(codes, out + LANES * 32)


@njit
def encode_q3(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    furthest = size = zero_f32()
    for j in range(16):
        codes = scratch + CODES + LANES * 16 * j
        scale = refined_scale(16, 4, x + VECTOR * 16 * j, scratch + LEVELS, codes)
        put_floats(scratch + SCALES, j, scale)
        more = above(absolute(scale), size)
        size = select(more, absolute(scale), size)
        furthest = select(more, scale, furthest)
    has_any = differs(furthest, zero_f32())
    factor = div(f32x16(np.float32(-32)), furthest)
    for j in range(16):
        level = clamped(nearest_int(mul(factor, floats(scratch + SCALES, j))), -32, 31)
        level = add_i32(level, integers(32))
        put_code(scratch + SCALE_CODES, j, select_i32(has_any, level, zero_i32()))
    put_q3(x, select(has_any, div(f32x16(ONE), factor), zero_f32()), out, scratch)


@njit
def encode_weighted_q3(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    variance = mean_square(x, 2.0)
    for j in range(16):
        at = x + VECTOR * 16 * j
        put_floats(scratch + SUMS, j, weigh(16, at, importance + 64 * j, variance, scratch))
        scale = symmetric_scale(16, 4, at, scratch, scratch + CODES + LANES * 16 * j)
        put_floats(scratch + SCALES, j, scale)
    codes = scratch + SCALE_CODES
    d = symmetric_scale(16, 32, scratch + SCALES, scratch + SUMS, codes)
    put_q3(x, d, out, scratch)


@njit
def put_small_scales(out: Address, scratch: Address) -> None:
    """The 12 bytes of eight scales and minima of 6 bits each, q4_K's and q5_K's."""
    scales, minima = scratch + SCALE_CODES, scratch + MINIMUM_CODES
    for j in range(4):
        for offset, codes in ((0, scales), (4, minima)):
            upper = shifted_left(shifted_right(code(codes, j + 4), 4), 6)
            put_code(out, j + offset, or_i32(code(codes, j), upper))
        low = and_i32(code(scales, j + 4), integers(15))
        high = shifted_left(and_i32(code(minima, j + 4), integers(15)), 4)
        put_code(out, j + 8, or_i32(low, high))


@njit
def put_q45(x: Address, d: Lanes, m: Lanes, last: int, out: Address, scratch: Address) -> None:
    """The scales of a block of q4_K or q5_K, and its codes, to the scratch memory."""
    d_bits, m_bits = half_bits(d), half_bits(m)
    put_half(out, 0, d_bits)
    put_half(out, 2, m_bits)
    d, m = half_value(d_bits), half_value(m_bits)
    for j in range(8):
        for codes in (scratch + SCALE_CODES, scratch + MINIMUM_CODES):
            put_code(codes, j, least_i32(integers(63), code(codes, j)))
        group_d = mul(d, to_f32(code(scratch + SCALE_CODES, j)))
        group_m = mul(m, to_f32(code(scratch + MINIMUM_CODES, j)))
        codes = scratch + CODES + LANES * 32 * j
        round_group(32, last, x + VECTOR * 32 * j, codes, group_d, group_m)
    put_small_scales(out + LANES * 4, scratch)


@njit
def search_q45(x: Address, last: int, first_step: float, n_steps: int, scratch: Address) -> None:
    for j in range(8):
        at = x + VECTOR * 32 * j
        spread = sqrt(div(sum_of_squares(32, at, zero_f32()), f32x16(np.float32(32))))
        for i in range(32):
            put_floats(scratch, i, add(spread, absolute(floats(at, i))))
        search_affine(x, scratch, 32, last, first_step, 0.1, n_steps, False, j)


@njit
def search_weighted_q45(
    x: Address, importance: Address, last: int, scratch: Address
) -> tuple[Lanes, Lanes]:
    """The scales of scales and of minima."""
    variance = mean_square(x, 2.0)
    for j in range(8):
        total = weigh(32, x + VECTOR * 32 * j, importance + 128 * j, variance, scratch)
        put_floats(scratch + SUMS, j, total)
        search_affine(x, scratch, 32, last, -0.9, 0.05, 36, False, j)
    weights = scratch + SUMS
    d = positive_scale(8, 63, scratch + SCALES, weights, scratch + SCALE_CODES)
    return d, positive_scale(8, 63, scratch + MINIMA, weights, scratch + MINIMUM_CODES)


@njit
def put_q4(x: Address, d: Lanes, m: Lanes, out: Address, scratch: Address) -> None:
    put_q45(x, d, m, 15, out, scratch)
    for part in range(4):
        codes = scratch + CODES + LANES * 64 * part
        put_nibbles(codes, out + LANES * (16 + 32 * part), 32, 32)


@njit
def encode_q4(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    search_q45(x, 15, -1.0, 20, scratch)
    d = code_scales(scratch + SCALES, scratch + SCALE_CODES, 8, 63)
    m = code_scales(scratch + MINIMA, scratch + MINIMUM_CODES, 8, 63)
    put_q4(x, d, m, out, scratch)


@njit
def encode_weighted_q4(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    d, m = search_weighted_q45(x, importance, 15, scratch)
    put_q4(x, d, m, out, scratch)


@njit
def put_q5(x: Address, d: Lanes, m: Lanes, out: Address, scratch: Address) -> None:
    put_q45(x, d, m, 31, out, scratch)
    codes = scratch + CODES
    for i in range(32):
        upper = zero_i32()
        for j in range(8):
            bit = shifted_right(code(codes, 32 * j + i), 4)
            upper = or_i32(upper, shifted_left(bit, j))
        put_code(out, 16 + i, upper)
    for i in range(BLOCK):
        put_code(codes, i, and_i32(code(codes, i), integers(15)))
    for part in range(4):
        put_nibbles(codes + LANES * 64 * part, out + LANES * (48 + 32 * part), 32, 32)


@njit
def encode_q5(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    search_q45(x, 31, -0.5, 15, scratch)
    d = code_scales(scratch + SCALES, scratch + SCALE_CODES, 8, 63)
    m = code_scales(scratch + MINIMA, scratch + MINIMUM_CODES, 8, 63)
    put_q5(x, d, m, out, scratch)


@njit
def encode_weighted_q5(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    d, m = search_weighted_q45(x, importance, 31, scratch)
    put_q5(x, d, m, out, scratch)


@njit
def put_q6(x: Address, out: Address, scratch: Address) -> None:
    """Pack a block of q6_K whose groups have scales."""
    furthest = size = zero_f32()
    for j in range(16):
        scale = floats(scratch + SCALES, j)
        more = above(absolute(scale), size)
        size = select(more, absolute(scale), size)
        furthest = select(more, scale, furthest)
    is_zero = above(f32x16(SMALLEST), size)
    factor = div(f32x16(np.float32(-128)), furthest)
    bits = half_bits(div(f32x16(ONE), factor))
    put_half(out, 208, bits)
    d = half_value(bits)
    codes = scratch + CODES
    for j in range(16):
        level = nearest_int(mul(factor, floats(scratch + SCALES, j)))
        level = least_i32(integers(127), level)
        put_code(out, 192 + j, level)
        group = codes + LANES * 16 * j
        round_symmetric_group(x + VECTOR * 16 * j, 32, group, mul(d, to_f32(level)))
    for half in range(2):
        for i in range(32):
            upper = zero_i32()
            for j in range(4):
                bits = shifted_right(code(codes, 128 * half + 32 * j + i), 4)
                upper = or_i32(upper, shifted_left(bits, 2 * j))
            put_code(out, 128 + 32 * half + i, upper)
    for i in range(BLOCK):
        put_code(codes, i, and_i32(code(codes, i), integers(15)))
    for half in range(2):
        put_nibbles(codes + LANES * 128 * half, out + LANES * 64 * half, 64, 64)
    for i in range(210):
        put_code(out, i, select_i32(is_zero, zero_i32(), code(out, i)))


@njit
def encode_q6(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    for j in range(16):
        at = x + VECTOR * 16 * j
        weigh_by_squares(16, at, scratch)
        scale = symmetric_scale(16, 32, at, scratch, scratch + CODES + LANES * 16 * j)
        put_floats(scratch + SCALES, j, scale)
    put_q6(x, out, scratch)


@njit
def encode_weighted_q6(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    for j in range(16):
        weigh_by_importance(16, importance + 64 * j, scratch)
        codes = scratch + CODES + LANES * 16 * j
        scale = symmetric_scale(16, 32, x + VECTOR * 16 * j, scratch, codes)
        put_floats(scratch + SCALES, j, scale)
    put_q6(x, out, scratch)


q2_k = SimpleNamespace(encode=encode_q2, encode_weighted=encode_weighted_q2)
q3_k = SimpleNamespace(encode=encode_q3, encode_weighted=encode_weighted_q3)
q4_k = SimpleNamespace(encode=encode_q4, encode_weighted=encode_weighted_q4)
q5_k = SimpleNamespace(encode=encode_q5, encode_weighted=encode_weighted_q5)
q6_k = SimpleNamespace(encode=encode_q6, encode_weighted=encode_weighted_q6)
