"""I-quants of two and three bits, sixteen rows at a time, as ggml-quants.c's
`quantize_row_iq3_xxs_impl`, `iq3_s`, `iq2_s`, `iq2_xs` and `iq2_xxs` do.

For each of some scales, codes are rounded by themselves. Where 4 or 8 codes are no point of the
grid, they become the neighbour (`neighbours.py`) with the least weighted error.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types

from localkv.quant_formats.shared.cpu.quantizing import (
    CODES,
    HALF,
    LARGEST_FLOAT,
    ONE,
    SCALES,
    SCRATCH_BYTES,
    SMALLEST,
    above,
    above_i32,
    any_lane,
    both,
    clamped,
    code,
    differs,
    floats,
    half_bits,
    integers,
    nearest_int,
    or_i32,
    positive_scale,
    put_code,
    put_floats,
    put_half,
    same_i32,
    shifted_left,
    shifted_right,
    sum_of_squares,
    weigh,
    weigh_by_squares,
    without,
)
from localkv.simd import LANES
from localkv.simd.arithmetic import (
    absolute,
    add,
    at_least,
    div,
    f32x16,
    max_lanes,
    maximum,
    mul,
    select,
    select_i32,
    sqrt,
    sub,
    to_f32,
    zero_f32,
    zero_i32,
)
from localkv.simd.integer import add_i32, and_i32, mul_i32, xor_i32
from localkv.simd.kinds import Address, Lanes
from localkv.simd.memory import (
    broadcast_f32,
    get_i32,
    get_u8,
    load_i32,
    load_mask,
    load_u8,
    put_i32,
    put_u8,
    store_f32,
    store_i32,
    store_mask,
)
from localkv.simd.vector import I32x16, call, i32, lanes_of, lanewise

VECTOR = 4 * LANES
SIZES = SCRATCH_BYTES
ROOTS = SIZES + 32 * VECTOR
TRIED = ROOTS + 32 * VECTOR
SIGNS = TRIED + 32 * LANES
PLACES = SIGNS + 4 * VECTOR
FACTORS = PLACES + VECTOR
ON_GRID = FACTORS + VECTOR
TRIED_ON_GRID = ON_GRID + 8 * 2
"""Further scratch memory: magnitudes, roots of weights, codes that are tried, signs, places and
scales of all lanes, and masks of which points were on the grid."""

least_lane = lanewise(
    lambda b, x: call(b, "llvm.vector.reduce.smin.v16i32", i32, [x]), [I32x16], types.int32
)
plus_lane = lanewise(
    lambda b, x: b.add(x, ir.Constant(lanes_of(i32), list(range(LANES)))), [I32x16], I32x16
)
"""Each lane's number is added to it."""
FAR = 1 << 30
OFF_GRID, GROUPS_OFF_GRID, EVERY = range(3)


@njit
def nearest_neighbour(
    x: Address,
    roots: Address,
    n: int,
    lane: int,
    factor: Address,
    first: int,
    n_pieces: int,
    table: Address,
) -> int:
    """The point whose multiple is nearest to n values of a lane, the first of several."""
    scale = broadcast_f32(factor, lane)
    points, codes = table + get_i32(table, 1), table + get_i32(table, 2)
    best, piece_of = f32x16(LARGEST_FLOAT), zero_i32()
    for piece in range(first, first + n_pieces):
        total = zero_f32()
        for i in range(n):
            q = to_f32(load_u8(codes, (piece * n + i) * LANES))
            error = sub(mul(scale, q), broadcast_f32(x, LANES * i + lane))
            weighted = mul(broadcast_f32(roots, LANES * i + lane), error)
            total = add(total, mul(weighted, error))
        nearer = above(best, total)
        best = select(nearer, total, best)
        piece_of = select_i32(nearer, integers(piece), piece_of)
    least = f32x16(-max_lanes(mul(f32x16(-ONE), best)))
    order = plus_lane(mul_i32(piece_of, integers(LANES)))
    order = select_i32(at_least(least, best), order, integers(FAR))
    point: int = get_i32(points, least_lane(order))
    return point


@njit
def take_points(
    x: Address,
    roots: Address,
    n: int,
    n_levels: int,
    scale: Lanes,
    codes: Address,
    table: Address,
    scratch: Address,
) -> Lanes:
    """Replace codes that are no point of the grid by the nearest neighbour's; where they were one.

    Args:
        x, roots, codes: of n values.
    """
    place = zero_i32()
    for i in range(n - 1, -1, -1):
        place = add_i32(mul_i32(place, integers(n_levels)), code(codes, i))
    store_i32(scratch + PLACES, 0, place)
    store_f32(scratch + FACTORS, 0, scale)
    grid = table + get_i32(table, 3)
    pieces = table + get_i32(table, 0)
    for lane in range(LANES):
        at = get_i32(scratch + PLACES, lane)
        point = get_i32(table, 4 + at)
        put_i32(scratch + PLACES, lane, point)
        if point < 0:
            n_pieces = get_i32(pieces, at)
            point = nearest_neighbour(
                x, roots, n, lane, scratch + FACTORS, -point - 1, n_pieces, table
            )
            for i in range(n):
                put_u8(codes, LANES * i + lane, get_u8(grid, point * n + i))
    return above_i32(load_i32(scratch + PLACES, 0), integers(-1))


@njit
def points_of(codes: Address, n: int, n_levels: int, table: Address, scratch: Address) -> Lanes:
    """The points that n codes are."""
    place = zero_i32()
    for i in range(n - 1, -1, -1):
        place = add_i32(mul_i32(place, integers(n_levels)), code(codes, i))
    store_i32(scratch + PLACES, 0, place)
    for lane in range(LANES):
        put_i32(scratch + PLACES, lane, get_i32(table, 4 + get_i32(scratch + PLACES, lane)))
    return load_i32(scratch + PLACES, 0)


@njit
def split_signs(n: int, x: Address, even: bool, scratch: Address) -> Lanes:
    """Magnitudes and signs of n values, whose weights are known; the largest magnitude.

    Args:
        even: an even number of 8 signs is negative: else that of the value whose error counts least
            is wrong, and so is its magnitude's.
    """
    largest = zero_f32()
    for k in range(n // 8):
        bits = n_negative = zero_i32()
        for i in range(8):
            value = floats(x, 8 * k + i)
            is_negative = select_i32(at_least(value, zero_f32()), zero_i32(), integers(1))
            n_negative = add_i32(n_negative, is_negative)
            bits = or_i32(bits, shifted_left(is_negative, i))
            size = select(at_least(value, zero_f32()), value, mul(f32x16(-ONE), value))
            put_floats(scratch + SIZES, 8 * k + i, size)
        if even:
            is_odd = same_i32(and_i32(n_negative, integers(1)), integers(1))
            least_at, least = zero_i32(), zero_f32()
            for i in range(8):
                value = floats(x, 8 * k + i)
                error = mul(mul(floats(scratch, 8 * k + i), value), value)
                if i == 0:
                    least = error
                else:
                    less = above(least, error)
                    least = select(less, error, least)
                    least_at = select_i32(less, integers(i), least_at)
            for i in range(8):
                is_wrong = both(is_odd, same_i32(least_at, integers(i)))
                size = floats(scratch + SIZES, 8 * k + i)
                size = select(is_wrong, mul(f32x16(-ONE), size), size)
                put_floats(scratch + SIZES, 8 * k + i, size)
                bits = select_i32(is_wrong, xor_i32(bits, integers(1 << i)), bits)
            bits = and_i32(bits, integers(127))
        store_i32(scratch + SIGNS, LANES * k, bits)
    for i in range(n):
        size = floats(scratch + SIZES, i)
        largest = size if i == 0 else maximum(largest, size)
        put_floats(scratch + ROOTS, i, sqrt(floats(scratch, i)))
    return largest


@njit
def round_codes(n: int, n_levels: int, factor: Lanes, x: Address, codes: Address) -> None:
    for i in range(n):
        shifted = sub(mul(factor, floats(x, i)), f32x16(ONE))
        put_code(codes, i, clamped(nearest_int(mul(f32x16(HALF), shifted)), 0, n_levels - 1))


@njit
def moments(n: int, x: Address, weights: Address, codes: Address) -> tuple[Lanes, Lanes]:
    products = squares = zero_f32()
    for i in range(n):
        weight = floats(weights, i)
        q = to_f32(add_i32(add_i32(code(codes, i), code(codes, i)), integers(1)))
        products = add(products, mul(mul(weight, floats(x, i)), q))
        squares = add(squares, mul(mul(weight, q), q))
    return products, squares


@njit
def copy_codes(n: int, where: Lanes, source: Address, goal: Address) -> None:
    for i in range(n):
        put_code(goal, i, select_i32(where, code(source, i), code(goal, i)))


@njit
def search_scale(
    n: int,
    of_point: int,
    n_levels: int,
    tries: int,
    step: float,
    largest: Lanes,
    scale: Lanes,
    every: int,
    codes: Address,
    table: Address,
    scratch: Address,
) -> Lanes:
    """The best of some scales of n magnitudes, and their codes.

    Args:
        of_point: values of a point.
        largest: what the last code stands for, about.
        scale: where no scale is any good.
        every: whose codes are rounded once more: `OFF_GRID`, those that are no points;
            `GROUPS_OFF_GRID`, all of a group that has such; `EVERY`, all.
    """
    x, roots, tried = scratch + SIZES, scratch + ROOTS, scratch + TRIED
    n_points, top = n // of_point, 2 * n_levels - 1
    best = zero_f32()
    none = above(zero_f32(), zero_f32())
    everywhere = at_least(zero_f32(), zero_f32())
    for i in range(n):
        put_code(codes, i, zero_i32())
    for k in range(n_points):
        store_mask(scratch + ON_GRID, k, everywhere if every == OFF_GRID else none)
    for i in range(-tries, tries + 1):
        steps = np.float32(top) + np.float32(i) * np.float32(step)
        factor = div(f32x16(steps), largest)
        round_codes(n, n_levels, factor, x, tried)
        this_scale = div(f32x16(ONE), factor)
        for k in range(n_points):
            at = of_point * k
            on_grid = take_points(
                x + VECTOR * at,
                roots + VECTOR * at,
                of_point,
                n_levels,
                this_scale,
                tried + LANES * at,
                table,
                scratch,
            )
            store_mask(scratch + TRIED_ON_GRID, k, on_grid)
        products, squares = moments(n, x, scratch, tried)
        better = both(
            above(squares, zero_f32()), above(mul(products, products), mul(best, squares))
        )
        if any_lane(better):
            scale = select(better, div(products, squares), scale)
            best = select(better, mul(scale, products), best)
            copy_codes(n, better, tried, codes)
            for k in range(n_points if every != EVERY else 0):
                before = without(load_mask(scratch + ON_GRID, k), better)
                now = both(load_mask(scratch + TRIED_ON_GRID, k), better)
                merged = without(everywhere, without(without(everywhere, before), now))
                store_mask(scratch + ON_GRID, k, merged)
    return refined(n, of_point, n_levels, scale, every, codes, table, scratch)


@njit
def refined(
    n: int,
    of_point: int,
    n_levels: int,
    scale: Lanes,
    every: int,
    codes: Address,
    table: Address,
    scratch: Address,
) -> Lanes:
    """Round codes once more with the scale that was found; the scale for them."""
    x, roots, tried = scratch + SIZES, scratch + ROOTS, scratch + TRIED
    is_positive = above(scale, zero_f32())
    changes = above(zero_f32(), zero_f32())
    everywhere = at_least(zero_f32(), zero_f32())
    round_codes(n, n_levels, div(f32x16(ONE), scale), x, tried)
    of_group = everywhere
    for k in range(n // of_point):
        of_group = both(of_group, load_mask(scratch + ON_GRID, k))
    for k in range(n // of_point):
        on_grid = of_group if every == GROUPS_OFF_GRID else load_mask(scratch + ON_GRID, k)
        off_grid = without(is_positive, on_grid)
        if any_lane(off_grid):
            at = of_point * k
            take_points(
                x + VECTOR * at,
                roots + VECTOR * at,
                of_point,
                n_levels,
                scale,
                tried + LANES * at,
                table,
                scratch,
            )
            copy_codes(of_point, off_grid, tried + LANES * at, codes + LANES * at)
            changes = without(everywhere, without(without(everywhere, changes), off_grid))
    products, squares = moments(n, x, scratch, codes)
    changes = both(changes, above(squares, zero_f32()))
    return select(changes, div(products, squares), scale)


@njit
def put_word(out: Address, i: int, word: Lanes) -> None:
    for byte in range(4):
        put_code(out, i + byte, shifted_right(word, 8 * byte))


@njit
def signs_of(k: int, is_flipped: Lanes, mask: int, is_zero: Lanes, scratch: Address) -> Lanes:
    """The signs of 8 values; of a negative scale, the others; none of zeros."""
    bits = load_i32(scratch + SIGNS, LANES * k)
    bits = select_i32(is_flipped, xor_i32(bits, integers(mask)), bits)
    return select_i32(is_zero, zero_i32(), bits)


@njit
def keep_scale(j: int, scale: Lanes, is_zero: Lanes, scratch: Address) -> Lanes:
    """Store the magnitude of group j's scale; where it is negative."""
    scale = select(is_zero, zero_f32(), scale)
    is_flipped = above(zero_f32(), scale)
    put_floats(scratch + SCALES, j, absolute(scale))
    return is_flipped


@njit
def largest_scale(n: int, scratch: Address) -> Lanes:
    largest = zero_f32()
    for j in range(n):
        largest = maximum(largest, floats(scratch + SCALES, j))
    return largest


@njit
def scale_code(j: int, factor: Lanes, has_any: Lanes, scratch: Address) -> Lanes:
    """The 4 bits of group j's scale."""
    shifted = sub(mul(factor, floats(scratch + SCALES, j)), f32x16(ONE))
    bits = clamped(nearest_int(mul(f32x16(HALF), shifted)), 0, 15)
    return select_i32(has_any, bits, zero_i32())


@njit
def put_scale(largest: Lanes, fudge: float, out: Address) -> tuple[Lanes, Lanes]:
    """Store d; the factor of the groups' scales, and where there are any."""
    has_any = differs(largest, zero_f32())
    d = div(largest, f32x16(np.float32(31)))
    stored = mul(d, f32x16(np.float32(fudge)))
    put_half(out, 0, half_bits(select(has_any, stored, zero_f32())))
    return div(f32x16(ONE), d), has_any


@njit
def put_scale_pairs(
    n: int, at: int, factor: Lanes, has_any: Lanes, out: Address, s: Address
) -> None:
    for j in range(0, n, 2):
        low = scale_code(j, factor, has_any, s)
        upper = shifted_left(scale_code(j + 1, factor, has_any, s), 4)
        put_code(out, at + j // 2, or_i32(low, upper))


@njit
def clear_where(is_zero: Lanes, n: int, out: Address) -> None:
    for i in range(n):
        put_code(out, i, select_i32(is_zero, zero_i32(), code(out, i)))


@njit
def variance_of(x: Address, times: float) -> Lanes:
    total = mul(f32x16(np.float32(times)), sum_of_squares(256, x, zero_f32()))
    return div(total, f32x16(np.float32(256)))


@njit
def weigh_group(
    n: int, x: Address, importance: Address, variance: Lanes, weighted: bool, scratch: Address
) -> None:
    if weighted:
        weigh(n, x, importance, variance, scratch)
    else:
        weigh_by_squares(n, x, scratch)


@njit
def iq3_xxs_block(
    x: Address, importance: Address, out: Address, scratch: Address, table: Address, weighted: bool
) -> None:
    variance, codes = variance_of(x, 2.0), scratch + CODES
    for j in range(8):
        at = x + VECTOR * 32 * j
        weigh_group(32, at, importance + 128 * j, variance, weighted, scratch)
        largest = split_signs(32, at, True, scratch)
        is_zero = above(f32x16(np.float32(1e-8)), largest)
        scale = div(largest, f32x16(np.float32(15)))
        scale = search_scale(32, 4, 8, 15, 0.2, largest, scale, OFF_GRID, codes, table, scratch)
        is_flipped = keep_scale(j, scale, is_zero, scratch)
        for k in range(8):
            point = points_of(codes + LANES * 4 * k, 4, 8, table, scratch)
            put_code(out, 2 + 8 * j + k, select_i32(is_zero, zero_i32(), point))
        word = zero_i32()
        for k in range(4):
            bits = signs_of(k, is_flipped, 127, is_zero, scratch)
            word = or_i32(word, shifted_left(bits, 7 * k))
        put_word(out, 66 + 4 * j, word)
    factor, has_any = put_scale(largest_scale(8, scratch), 1.0125, out)
    for j in range(8):
        bits = shifted_left(scale_code(j, factor, has_any, scratch), 4)
        put_code(out, 69 + 4 * j, or_i32(code(out, 69 + 4 * j), bits))
    clear_where(without(at_least(zero_f32(), zero_f32()), has_any), 98, out)


@njit
def iq3_s_block(
    x: Address, importance: Address, out: Address, scratch: Address, table: Address, weighted: bool
) -> None:
    variance, codes = variance_of(x, 2.0), scratch + CODES
    for j in range(8):
        at = x + VECTOR * 32 * j
        weigh_group(32, at, importance + 128 * j, variance, weighted, scratch)
        largest = split_signs(32, at, False, scratch)
        is_zero = at_least(zero_f32(), largest)
        scale = div(largest, f32x16(np.float32(15)))
        scale = search_scale(
            32, 4, 8, 9, 0.2, largest, scale, GROUPS_OFF_GRID, codes, table, scratch
        )
        is_flipped = keep_scale(j, scale, is_zero, scratch)
        upper = zero_i32()
        for k in range(8):
            point = points_of(codes + LANES * 4 * k, 4, 8, table, scratch)
            point = select_i32(is_zero, zero_i32(), point)
            put_code(out, 2 + 8 * j + k, point)
            upper = or_i32(upper, shifted_left(shifted_right(point, 8), k))
        put_code(out, 66 + j, upper)
        for k in range(4):
            put_code(out, 74 + 4 * j + k, signs_of(k, is_flipped, 255, is_zero, scratch))
    factor, has_any = put_scale(largest_scale(8, scratch), 1.033, out)
    put_scale_pairs(8, 106, factor, has_any, out, scratch)


@njit
def iq2_s_block(
    x: Address, importance: Address, out: Address, scratch: Address, table: Address, weighted: bool
) -> None:
    variance, codes = variance_of(x, 2.0), scratch + CODES
    for i in range(8):
        put_code(out, 66 + i, zero_i32())
    for j in range(16):
        at = x + VECTOR * 16 * j
        weigh_group(16, at, importance + 64 * j, variance, weighted, scratch)
        if not weighted:
            quarter = mul(f32x16(np.float32(0.25)), variance)
            for i in range(16):
                put_floats(scratch, i, add(quarter, floats(scratch, i)))
        largest = split_signs(16, at, False, scratch)
        is_zero = above(f32x16(np.float32(1e-8)), largest)
        scale = div(largest, f32x16(np.float32(5)))
        scale = search_scale(16, 8, 3, 9, 0.1, largest, scale, OFF_GRID, codes, table, scratch)
        is_flipped = keep_scale(j, scale, is_zero, scratch)
        for k in range(2):
            point = points_of(codes + LANES * 8 * k, 8, 3, table, scratch)
            point = select_i32(is_zero, zero_i32(), point)
            i = 2 * j + k
            put_code(out, 2 + i, point)
            upper = shifted_left(shifted_right(point, 8), 2 * (i % 4))
            put_code(out, 66 + i // 4, or_i32(code(out, 66 + i // 4), upper))
            put_code(out, 34 + i, signs_of(k, is_flipped, 255, is_zero, scratch))
    factor, has_any = put_scale(largest_scale(16, scratch), 0.9875, out)
    put_scale_pairs(16, 74, factor, has_any, out, scratch)


@njit
def iq2_xs_block(
    x: Address, importance: Address, out: Address, scratch: Address, table: Address
) -> None:
    variance, codes = variance_of(x, 1.0), scratch + CODES
    for j in range(16):
        at = x + VECTOR * 16 * j
        weigh(16, at, importance + 64 * j, variance, scratch)
        largest = split_signs(16, at, True, scratch)
        is_zero = above(f32x16(SMALLEST), largest)
        scale = div(largest, f32x16(np.float32(5)))
        scale = search_scale(16, 8, 3, 9, 0.1, largest, scale, OFF_GRID, codes, table, scratch)
        is_flipped = keep_scale(j, scale, is_zero, scratch)
        for k in range(2):
            point = points_of(codes + LANES * 8 * k, 8, 3, table, scratch)
            point = select_i32(is_zero, zero_i32(), point)
            bits = shifted_left(signs_of(k, is_flipped, 127, is_zero, scratch), 9)
            word = or_i32(point, bits)
            put_code(out, 2 + 4 * j + 2 * k, word)
            put_code(out, 3 + 4 * j + 2 * k, shifted_right(word, 8))
    factor, has_any = put_scale(largest_scale(16, scratch), 1.0, out)
    put_scale_pairs(16, 66, factor, has_any, out, scratch)
    clear_where(without(at_least(zero_f32(), zero_f32()), has_any), 66, out)


@njit
def iq2_xxs_block(
    x: Address, importance: Address, out: Address, scratch: Address, table: Address
) -> None:
    variance, codes = variance_of(x, 1.0), scratch + CODES
    for j in range(8):
        at = x + VECTOR * 32 * j
        weigh(32, at, importance + 128 * j, variance, scratch)
        largest = split_signs(32, at, True, scratch)
        is_zero = above(f32x16(SMALLEST), largest)
        scale = positive_scale(32, 4, scratch + SIZES, scratch, codes)
        top = mul(scale, f32x16(np.float32(3)))
        is_zero = above_i32(
            add_i32(
                select_i32(is_zero, integers(1), zero_i32()),
                select_i32(at_least(zero_f32(), top), integers(1), zero_i32()),
            ),
            zero_i32(),
        )
        scale = search_scale(32, 8, 3, 6, 0.1, top, scale, EVERY, codes, table, scratch)
        is_flipped = keep_scale(j, scale, is_zero, scratch)
        word = zero_i32()
        for k in range(4):
            point = points_of(codes + LANES * 8 * k, 8, 3, table, scratch)
            put_code(out, 2 + 8 * j + k, select_i32(is_zero, zero_i32(), point))
            bits = signs_of(k, is_flipped, 127, is_zero, scratch)
            word = or_i32(word, shifted_left(bits, 7 * k))
        put_word(out, 6 + 8 * j, word)
    factor, has_any = put_scale(largest_scale(8, scratch), 1.0, out)
    for j in range(8):
        bits = shifted_left(scale_code(j, factor, has_any, scratch), 4)
        put_code(out, 9 + 8 * j, or_i32(code(out, 9 + 8 * j), bits))
    clear_where(without(at_least(zero_f32(), zero_f32()), has_any), 66, out)


@njit
def encode_iq3_xxs(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    iq3_xxs_block(x, importance, out, scratch, table, False)


@njit
def encode_weighted_iq3_xxs(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    iq3_xxs_block(x, importance, out, scratch, table, True)


@njit
def encode_iq3_s(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    iq3_s_block(x, importance, out, scratch, table, False)


@njit
def encode_weighted_iq3_s(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    iq3_s_block(x, importance, out, scratch, table, True)


@njit
def encode_iq2_s(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    iq2_s_block(x, importance, out, scratch, table, False)


@njit
def encode_weighted_iq2_s(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    iq2_s_block(x, importance, out, scratch, table, True)


@njit
def encode_weighted_iq2_xs(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    iq2_xs_block(x, importance, out, scratch, table)


@njit
def encode_weighted_iq2_xxs(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    iq2_xxs_block(x, importance, out, scratch, table)


iq3_xxs = SimpleNamespace(encode=encode_iq3_xxs, encode_weighted=encode_weighted_iq3_xxs)
iq3_s = SimpleNamespace(encode=encode_iq3_s, encode_weighted=encode_weighted_iq3_s)
iq2_s = SimpleNamespace(encode=encode_iq2_s, encode_weighted=encode_weighted_iq2_s)
iq2_xs = SimpleNamespace(encode_weighted=encode_weighted_iq2_xs)
iq2_xxs = SimpleNamespace(encode_weighted=encode_weighted_iq2_xxs)
