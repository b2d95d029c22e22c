"""The nuq types for Numba: codes that select from a codebook.

Planes are d, o, qh of nuq3, qs, and the codebook. Rows are packed as the reference packs them, bit
for bit (the payload of a NaN aside). A block is packed when its turn comes, as if it were the last
one of a row; the second of two packs both once more, without their outlier. It is two vectors,
values i and i + 16.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.low_bits.cpu import three_bits, two_bits
from localkv.quant_formats.nuq import FRACTION, PAIR, ROUNDED, SIX_BIT_LIMIT, SIX_BITS, STRETCHES
from localkv.quant_formats.shared.codebooks import LARGEST as LARGEST_NUMBER
from localkv.quant_formats.shared.cpu.rounding import LIMIT, ZERO, inverse, put_half, scale, within
from localkv.simd.arithmetic import (
    absolute,
    add,
    at_least,
    bits_float,
    f32x16,
    first_lane,
    float_bits,
    i32x16,
    if_positive,
    lanes_below,
    max_lanes,
    maximum,
    mul,
    select,
    select_i32,
    sub,
    sum_lanes,
    sum_lanes_i32,
    to_i32,
    zero_f32,
    zero_i32,
)
from localkv.simd.integer import (
    add_i32,
    and_i32,
    high_nibble,
    high_nibbles,
    low_nibble,
    low_nibbles,
    mul_i32,
    shift_left,
)
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import (
    get_f16,
    get_f32,
    load_f32,
    load_u8,
    put_u16,
    store_low_bytes,
    store_mask,
    store_nibbles,
)
from localkv.simd.quads import (
    byte_table,
    load_quads,
    load_quads_of_nibbles,
    look_up_of_64,
    look_up_quad,
    or_bits,
    pair_tables,
)
from localkv.simd.shuffle import look_up_f32

OFFSET = 128
STEPS = np.float32(LARGEST_NUMBER)
LARGEST = STEPS * LIMIT
HALF, NAN = np.float32(0.5), np.float32(np.nan)
PARTS, PART = np.float32(FRACTION), np.float32(1 / FRACTION)
AS_EXTREME, LARGER, SMALLER = (np.float32(stretch) for stretch in STRETCHES)
SHORT_LIMIT = np.float32(SIX_BIT_LIMIT)
THIRD_BIT = 4


@njit
def numbers(x: Address, first: Count) -> Any:
    """16 floats within what a scale reaches; a NaN stays one."""
    values, limit, least = load_f32(x, first), f32x16(LARGEST), f32x16(-LARGEST)
    values = if_positive(sub(values, limit), limit, values)
    return if_positive(sub(least, values), least, values)


@njit
def is_usable(low: Any, high: Any) -> bool:
    """Whether there is no NaN among 32 finite numbers."""
    total = sum_lanes(mul(add(low, high), zero_f32()))
    return bool(total == total)


@njit
def place_of_outlier(x: Address, first: Count) -> int:
    """Where the largest magnitude of 64 floats is, the first of several; -1 if both blocks have a
    NaN."""
    place, largest = -1, -np.float32(1)
    for block in range(first, first + PAIR, 32):
        low, high = numbers(x, block), numbers(x, block + 16)
        if is_usable(low, high):
            low, high = absolute(low), absolute(high)
            most = max_lanes(maximum(low, high))
            if most > largest:
                lane = first_lane(at_least(low, f32x16(most)))
                if lane == 16:
                    lane += first_lane(at_least(high, f32x16(most)))
                place, largest = block + lane, most
    return place


@njit
def without(x: Any, lane: int) -> Any:
    """0 in a lane, if there is one of this number."""
    return select(lanes_below(lane), x, select(lanes_below(lane + 1), zero_f32(), x))


@njit
def without_i32(x: Any, lane: int) -> Any:
    """`without` for integers."""
    return select_i32(lanes_below(lane), x, select_i32(lanes_below(lane + 1), zero_i32(), x))


@njit
def border(codebook: Address, code: int) -> Any:
    """Halfway from a number to the next one."""
    return (get_f32(codebook, code) + get_f32(codebook, code + 1)) * HALF


@njit
def nearest_numbers(y: Any, codebook: Address, n_codes: int) -> Any:
    """The codebook's numbers nearest to y, halfway the upper: an I32x16."""
    chosen = i32x16(np.int32(get_f32(codebook, 0)))
    for j in range(n_codes - 1):
        following = i32x16(np.int32(get_f32(codebook, j + 1)))
        chosen = select_i32(at_least(y, f32x16(border(codebook, j))), following, chosen)
    return chosen


@njit
def nearest_codes(y: Any, codebook: Address, n_codes: int) -> Any:
    """Their codes; of a NaN the first."""
    chosen = zero_i32()
    for j in range(n_codes - 1):
        following = i32x16(np.int32(j + 1))
        chosen = select_i32(at_least(y, f32x16(border(codebook, j))), following, chosen)
    return chosen


@njit
def six_bits(x: Any) -> Any:
    """The nearest number of six significant bits, halfway the one further from 0."""
    return bits_float((float_bits(x) + (1 << (SIX_BITS - 1))) >> SIX_BITS << SIX_BITS)


@njit(error_model="numpy")
def fitted_scale(low: Any, high: Any, outlier: int, codebook: Address, n_codes: int) -> Any:
    """The scale of 32 numbers; the outlier, if it is among them, does not count."""
    low, high = without(low, outlier), without(high, outlier - 16)
    most = max_lanes(maximum(low, high))
    below = max_lanes(maximum(sub(zero_f32(), low), sub(zero_f32(), high)))
    extreme = most if most >= below else -below
    d = scale(extreme if extreme != ZERO else ZERO, STEPS)
    factor, best = np.float32(1), ZERO
    to_units = f32x16(inverse(d))
    low, high = mul(low, to_units), mul(high, to_units)
    whole_low, whole_high = to_i32(mul(low, f32x16(PARTS))), to_i32(mul(high, f32x16(PARTS)))
    for stretch in (AS_EXTREME, LARGER, SMALLER):
        a = nearest_numbers(mul(low, f32x16(stretch)), codebook, n_codes)
        b = nearest_numbers(mul(high, f32x16(stretch)), codebook, n_codes)
        a, b = without_i32(a, outlier), without_i32(b, outlier - 16)
        sums = add_i32(mul_i32(whole_low, a), mul_i32(whole_high, b))
        products = np.float32(sum_lanes_i32(sums))
        squares = np.float32(sum_lanes_i32(add_i32(mul_i32(a, a), mul_i32(b, b))))
        fit = products / squares if squares > ZERO else ZERO
        if products * fit > best:
            factor, best = fit * PART, products * fit
    if n_codes == ROUNDED:
        return six_bits(within(d * factor, SHORT_LIMIT))
    return within(d * factor, LIMIT)


@njit
def put_codes(y: Any, z: Any, planes: Any, u: int, n_codes: int) -> None:
    """Write codes of values i and i + 16 of a block, in units of the codebook's numbers, with as
    many bits as `n_codes` takes; `qs` is the last plane."""
    codebook = planes[4]
    low, high = nearest_codes(y, codebook, n_codes), nearest_codes(z, codebook, n_codes)
    if n_codes == 16:
        both = add_i32(low, shift_left(high, i32x16(np.int32(4))))
        store_low_bytes(planes[2], 16 * u, both)
        return
    two_bits = i32x16(np.int32(3))
    low, high = and_i32(low, two_bits), and_i32(high, two_bits)
    qs = planes[3] if n_codes == 8 else planes[2]
    store_nibbles(qs, 8 * u, add_i32(low, shift_left(high, i32x16(np.int32(2)))))
    if n_codes == 8:
        with_third = f32x16(border(codebook, THIRD_BIT - 1))
        store_mask(planes[2], 2 * u, at_least(y, with_third))
        store_mask(planes[2], 2 * u + 1, at_least(z, with_third))


@njit
def put_block(x: Address, planes: Any, u: int, outlier: int, n_codes: int) -> None:
    """Write a block's scale and codes, and no outlier."""
    put_u16(planes[1], u, 0)
    low, high = numbers(x, 32 * u), numbers(x, 32 * u + 16)
    d = NAN
    if is_usable(low, high):
        d = fitted_scale(low, high, outlier - 32 * u, planes[4], n_codes)
    put_half(planes[0], u, d)
    to_units = f32x16(inverse(get_f16(planes[0], u)))
    put_codes(mul(low, to_units), mul(high, to_units), planes, u, n_codes)


@njit
def put_outlier(x: Address, planes: Any, u: int, outlier: int, n_codes: int) -> None:
    """Write what is missing to the outlier of blocks u and u + 1, and its place."""
    value = within(get_f32(x, outlier), LARGEST)
    d = get_f16(planes[0], outlier // 32)
    y, made = value * inverse(d), get_f32(planes[4], 0)
    for j in range(n_codes - 1):
        if y >= border(planes[4], j):
            made = get_f32(planes[4], j + 1)
    put_half(planes[1], u, within(value - made * d, LIMIT))
    put_u16(planes[1], u + 1, outlier - 32 * u)


@njit
def encode_block(x: Address, planes: Any, u: int, n_codes: int) -> None:
    """Pack block u, and if it is the second of two, the first one again, without their outlier."""
    outlier = place_of_outlier(x, 32 * (u - 1)) if u % 2 else -1
    for block in range(u - u % 2, u + 1):
        put_block(x, planes, block, outlier, n_codes)
    if outlier >= 0:
        put_outlier(x, planes, u - 1, outlier, n_codes)


@njit
def decode_nuq4(planes: Any, u: int) -> Any:
    packed, codebook = load_u8(planes[2], u * 16), planes[4]
    low = look_up_f32(codebook, low_nibble(packed))
    return low, look_up_f32(codebook, high_nibble(packed))


@njit
def numbers_nuq4(codebook: Any) -> Any:
    return byte_table(codebook, OFFSET)


@njit
def quads_nuq4(planes: Any, u: int) -> Any:
    packed, table = load_quads(planes[2], u * 16), planes[4]
    return look_up_quad(low_nibbles(packed), table), look_up_quad(high_nibbles(packed), table)


@njit
def encode_nuq4(x: Any, planes: Any, u: int) -> None:
    encode_block(x, planes, u, 16)


THIRD = 16
"""A code's third bit where nibbles are looked up."""


@njit
def decode_nuq3(planes: Any, u: int) -> Any:
    low, high = three_bits(planes[3], planes[2], u)
    return look_up_f32(planes[4], low), look_up_f32(planes[4], high)


@njit
def numbers_nuq3(codebook: Any) -> Any:
    return pair_tables(codebook, OFFSET, 8)


@njit
def quads_nuq3(planes: Any, u: int) -> Any:
    packed = load_quads_of_nibbles(planes[3], u * 8)
    low, high = or_bits((packed, packed), planes[2], u * 2, THIRD)
    return look_up_of_64(low, planes[4][0]), look_up_of_64(high, planes[4][1])


@njit
def encode_nuq3(x: Any, planes: Any, u: int) -> None:
    encode_block(x, planes, u, 8)


@njit
def decode_nuq2(planes: Any, u: int) -> Any:
    low, high = two_bits(planes[2], u)
    return look_up_f32(planes[4], low), look_up_f32(planes[4], high)


@njit
def numbers_nuq2(codebook: Any) -> Any:
    return pair_tables(codebook, OFFSET, 4)


@njit
def quads_nuq2(planes: Any, u: int) -> Any:
    packed, tables = load_quads_of_nibbles(planes[2], u * 8), planes[4]
    return look_up_quad(packed, tables[0]), look_up_quad(packed, tables[1])


@njit
def encode_nuq2(x: Any, planes: Any, u: int) -> None:
    encode_block(x, planes, u, 4)


nuq4 = SimpleNamespace(
    decode=decode_nuq4, quads=quads_nuq4, numbers=numbers_nuq4, encode=encode_nuq4
)
nuq3 = SimpleNamespace(
    decode=decode_nuq3, quads=quads_nuq3, numbers=numbers_nuq3, encode=encode_nuq3
)
nuq2 = SimpleNamespace(
    decode=decode_nuq2, quads=quads_nuq2, numbers=numbers_nuq2, encode=encode_nuq2
)
