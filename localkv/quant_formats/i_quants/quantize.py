"""I-quants of one to three bits, sixteen rows at a time, as ggml-quants.c's
`quantize_row_iq3_xxs_impl`, `iq3_s`, `iq2_s`, `iq2_xs`, `iq2_xxs`, `iq1_s` and `iq1_m` do.

For each of some scales, codes are rounded by themselves. Where 4 or 8 codes are no point of the
grid, they become the neighbour (`neighbours.py`) with the least weighted error.

IQ1 has three codes, so all ways to split the sorted values of a group into three are tried, each
with the levels shifted up and down by 1/8. Equal values keep their order, as glibc's `qsort` does.
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
    SCALE_CODES,
    SCALES,
    SCRATCH_BYTES,
    SMALLEST,
    TWO,
    above,
    above_i32,
    any_lane,
    both,
    clamped,
    code,
    differs,
    either,
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
    sub_i32,
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
SORTED = ON_GRID + VECTOR
SORTED_WEIGHTS = SORTED + 32 * VECTOR
ORDER = SORTED_WEIGHTS + 32 * VECTOR
SUMS_OF_SORTED = ORDER + 32 * LANES
SHIFTS = SUMS_OF_SORTED + 4 * 17 * VECTOR
KINDS = SHIFTS + VECTOR
"""IQ1's scratch memory: a group's values in order, their weights and places, and sums of those
before each. Then come what is added to levels of all lanes, and how groups' levels are shifted."""

least_lane = lanewise(
    lambda b, x: call(b, "llvm.vector.reduce.smin.v16i32", i32, [x]), [I32x16], types.int32
)
plus_lane = lanewise(
    lambda b, x: b.add(x, ir.Constant(lanes_of(i32), list(range(LANES)))), [I32x16], I32x16
)
"""Each lane's number is added to it."""
FAR = 1 << 30
EIGHTH = np.float32(0.125)
BOTH_DOWN = 3
"""How levels of IQ1 are shifted, if all are shifted down. Bit 1 stands for the first 8 of 16
values, bit 0 for the others; groups of 32 have both bits or none."""
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
    shifts: Address,
    table: Address,
) -> int:
    """The point whose multiple is nearest to n values of a lane, the first of several.

    Args:
        factor, shifts: of all lanes, what a level is multiplied with, and what is added to it
            before; `shifts` may be 0.
    """
    scale = broadcast_f32(factor, lane)
    points, codes = table + get_i32(table, 1), table + get_i32(table, 2)
    best, piece_of = f32x16(LARGEST_FLOAT), zero_i32()
    for piece in range(first, first + n_pieces):
        total = zero_f32()
        for i in range(n):
            q = to_f32(load_u8(codes, (piece * n + i) * LANES))
            if shifts != 0:
                q = add(q, broadcast_f32(shifts, lane))
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
    shifts: Address,
    table: Address,
    scratch: Address,
) -> Lanes:
    """Replace codes that are no point of the grid by the nearest neighbour's; where they were one.

    Args:
        x, roots, codes: of n values.
        scale: of levels, 1 for the first code, 3 for the next one, and so on.
        shifts: what is added to the levels of each lane, or 0.
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
                x, roots, n, lane, scratch + FACTORS, -point - 1, n_pieces, shifts, table
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
def is_better(products: Lanes, squares: Lanes, best: Lanes) -> Lanes:
    """Whether the best scale of codes leaves less error than `best` (products^2 / squares)."""
    gain = above(mul(products, products), mul(best, squares))
    return both(above(squares, zero_f32()), gain)


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
                0,
                table,
                scratch,
            )
            store_mask(scratch + TRIED_ON_GRID, k, on_grid)
        products, squares = moments(n, x, scratch, tried)
        better = is_better(products, squares, best)
        if any_lane(better):
            scale = select(better, div(products, squares), scale)
            best = select(better, mul(scale, products), best)
            copy_codes(n, better, tried, codes)
            for k in range(n_points if every != EVERY else 0):
                before = without(load_mask(scratch + ON_GRID, k), better)
                now = both(load_mask(scratch + TRIED_ON_GRID, k), better)
                merged = either(before, now)
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
                0,
                table,
                scratch,
            )
            copy_codes(of_point, off_grid, tried + LANES * at, codes + LANES * at)
            changes = either(changes, off_grid)
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
def scale_code(j: int, last: int, factor: Lanes, has_any: Lanes, scratch: Address) -> Lanes:
    """The code of group j's scale, 0 to `last`."""
    shifted = sub(mul(factor, floats(scratch + SCALES, j)), f32x16(ONE))
    bits = clamped(nearest_int(mul(f32x16(HALF), shifted)), 0, last)
    return select_i32(has_any, bits, zero_i32())


@njit
def put_scale(largest: Lanes, top: int, fudge: float, out: Address) -> tuple[Lanes, Lanes]:
    """Store d; the factor of the groups' scales, and where there are any.

    Args:
        top: how many d the largest scale is.
    """
    has_any = differs(largest, zero_f32())
    d = div(largest, f32x16(np.float32(top)))
    stored = mul(d, f32x16(np.float32(fudge)))
    put_half(out, 0, half_bits(select(has_any, stored, zero_f32())))
    return div(f32x16(ONE), d), has_any


@njit
def put_scale_pairs(
    n: int, at: int, factor: Lanes, has_any: Lanes, out: Address, s: Address
) -> None:
    for j in range(0, n, 2):
        low = scale_code(j, 15, factor, has_any, s)
        upper = shifted_left(scale_code(j + 1, 15, factor, has_any, s), 4)
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
    factor, has_any = put_scale(largest_scale(8, scratch), 31, 1.0125, out)
    for j in range(8):
        bits = shifted_left(scale_code(j, 15, factor, has_any, scratch), 4)
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
    factor, has_any = put_scale(largest_scale(8, scratch), 31, 1.033, out)
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
    factor, has_any = put_scale(largest_scale(16, scratch), 31, 0.9875, out)
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
    factor, has_any = put_scale(largest_scale(16, scratch), 31, 1.0, out)
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
        is_zero = either(is_zero, at_least(zero_f32(), top))
        scale = search_scale(32, 8, 3, 6, 0.1, top, scale, EVERY, codes, table, scratch)
        is_flipped = keep_scale(j, scale, is_zero, scratch)
        word = zero_i32()
        for k in range(4):
            point = points_of(codes + LANES * 8 * k, 8, 3, table, scratch)
            put_code(out, 2 + 8 * j + k, select_i32(is_zero, zero_i32(), point))
            bits = signs_of(k, is_flipped, 127, is_zero, scratch)
            word = or_i32(word, shifted_left(bits, 7 * k))
        put_word(out, 6 + 8 * j, word)
    factor, has_any = put_scale(largest_scale(8, scratch), 31, 1.0, out)
    for j in range(8):
        bits = shifted_left(scale_code(j, 15, factor, has_any, scratch), 4)
        put_code(out, 9 + 8 * j, or_i32(code(out, 9 + 8 * j), bits))
    clear_where(without(at_least(zero_f32(), zero_f32()), has_any), 66, out)


@njit
def sort_group(n: int, x: Address, scratch: Address) -> None:
    """Store n values in ascending order, equal ones in their own, with their weights and places."""
    values, weights, order = scratch + SORTED, scratch + SORTED_WEIGHTS, scratch + ORDER
    for i in range(n):
        put_floats(values, i, floats(x, i))
        put_floats(weights, i, floats(scratch, i))
        put_code(order, i, integers(i))
    for last in range(n - 1, 0, -1):
        value, weight, place = floats(values, 0), floats(weights, 0), code(order, 0)
        for i in range(last):
            next_value, next_weight = floats(values, i + 1), floats(weights, i + 1)
            next_place = code(order, i + 1)
            more = above(value, next_value)
            put_floats(values, i, select(more, next_value, value))
            put_floats(weights, i, select(more, next_weight, weight))
            put_code(order, i, select_i32(more, next_place, place))
            value = select(more, value, next_value)
            weight = select(more, weight, next_weight)
            place = select_i32(more, place, next_place)
        put_floats(values, last, value)
        put_floats(weights, last, weight)
        put_code(order, last, place)


@njit
def add_up(n: int, first: int, past: int, x_sums: Address, scratch: Address) -> Address:
    """Store sums of the first 0 to n sorted values, each times its weight, and of the weights.

    Args:
        first, past: values of these places in the group count, from `first` to before `past`.

    Returns:
        Where the sums of the weights are, behind the others.
    """
    weight_sums = x_sums + VECTOR * (n + 1)
    x_sum = weight_sum = zero_f32()
    put_floats(x_sums, 0, x_sum)
    put_floats(weight_sums, 0, weight_sum)
    for i in range(n):
        value, weight = floats(scratch + SORTED, i), floats(scratch + SORTED_WEIGHTS, i)
        place = code(scratch + ORDER, i)
        counts = both(above_i32(place, integers(first - 1)), above_i32(integers(past), place))
        x_sum = select(counts, add(x_sum, mul(weight, value)), x_sum)
        weight_sum = select(counts, add(weight_sum, weight), weight_sum)
        put_floats(x_sums, i + 1, x_sum)
        put_floats(weight_sums, i + 1, weight_sum)
    return weight_sums


@njit
def shifted_levels(n_eighths: int) -> tuple[Lanes, Lanes, Lanes]:
    """The three levels, shifted up by eighths."""
    shift = np.float32(n_eighths) * EIGHTH
    return f32x16(shift - ONE), f32x16(shift), f32x16(shift + ONE)


@njit
def split_alike(scale: Lanes, scratch: Address) -> tuple[Lanes, Lanes, Lanes, Lanes]:
    """The best of all ways to split 32 sorted values into three, whose levels are shifted alike.

    Returns:
        The scale, where the second and the third part begin (-1 if no way is any good), and how
        levels are shifted.
    """
    x_sums = scratch + SUMS_OF_SORTED
    weight_sums = add_up(32, 0, 32, x_sums, scratch)
    best, starts, ends, kind = f32x16(-LARGEST_FLOAT), integers(-1), integers(-1), zero_i32()
    x_total, weight_total = floats(x_sums, 32), floats(weight_sums, 32)
    for start in range(33):
        x_low, weight_low = floats(x_sums, start), floats(weight_sums, start)
        for end in range(start, 33):
            x_mid, weight_mid = sub(floats(x_sums, end), x_low), floats(weight_sums, end)
            weight_mid = sub(weight_mid, weight_low)
            x_high = sub(x_total, floats(x_sums, end))
            weight_high = sub(weight_total, floats(weight_sums, end))
            for down in range(2):
                low, mid, high = shifted_levels(1 - 2 * down)
                products = add(add(mul(x_low, low), mul(x_mid, mid)), mul(x_high, high))
                squares = add(mul(mul(weight_low, low), low), mul(mul(weight_mid, mid), mid))
                squares = add(squares, mul(mul(weight_high, high), high))
                better = is_better(products, squares, best)
                if any_lane(better):
                    scale = select(better, div(products, squares), scale)
                    best = select(better, mul(scale, products), best)
                    starts = select_i32(better, integers(start), starts)
                    ends = select_i32(better, integers(end), ends)
                    kind = select_i32(better, integers(BOTH_DOWN * down), kind)
    return scale, starts, ends, kind


@njit
def sums_of_split(
    total: Lanes, weight_total: Lanes, x: Lanes, at_start: Lanes, at_end: Lanes, down: int
) -> tuple[Lanes, Lanes]:
    """Products and squares of half a group.

    Args:
        total, weight_total: of its values times their weights, and of these.
        x: sums of the values below both splits, added.
        at_start, at_end: sums of the weights below each.
    """
    low, mid, high = shifted_levels(1 - 2 * down)
    products = sub(mul(total, high), x)
    squares = mul(mul(weight_total, high), high)
    squares = add(squares, mul(at_start, sub(mul(low, low), mul(mid, mid))))
    return products, add(squares, mul(at_end, sub(mul(mid, mid), mul(high, high))))


@njit
def split_halves(scale: Lanes, scratch: Address) -> tuple[Lanes, Lanes, Lanes, Lanes]:
    """The best of all ways to split 16 sorted values, both halves shifted by themselves.

    Returns:
        As `split_alike`.
    """
    x_0 = scratch + SUMS_OF_SORTED
    weight_0 = add_up(16, 0, 8, x_0, scratch)
    x_1 = weight_0 + VECTOR * 17
    weight_1 = add_up(16, 8, 16, x_1, scratch)
    best, starts, ends, kind = f32x16(-LARGEST_FLOAT), integers(-1), integers(-1), zero_i32()
    total_0, total_1 = floats(x_0, 16), floats(x_1, 16)
    all_0, all_1 = floats(weight_0, 16), floats(weight_1, 16)
    for start in range(17):
        for end in range(start, 17):
            below_0 = add(floats(x_0, start), floats(x_0, end))
            below_1 = add(floats(x_1, start), floats(x_1, end))
            low_0, mid_0 = floats(weight_0, start), floats(weight_0, end)
            low_1, mid_1 = floats(weight_1, start), floats(weight_1, end)
            for tried in range(4):
                down_0, down_1 = tried >> 1, tried & 1
                p_0, s_0 = sums_of_split(total_0, all_0, below_0, low_0, mid_0, down_0)
                p_1, s_1 = sums_of_split(total_1, all_1, below_1, low_1, mid_1, down_1)
                products, squares = add(p_0, p_1), add(s_0, s_1)
                better = is_better(products, squares, best)
                if any_lane(better):
                    scale = select(better, div(products, squares), scale)
                    best = select(better, mul(scale, products), best)
                    starts = select_i32(better, integers(start), starts)
                    ends = select_i32(better, integers(end), ends)
                    kind = select_i32(better, integers(tried), kind)
    return scale, starts, ends, kind


@njit
def shift_of(kind: Lanes, k: int) -> Lanes:
    """What is added to the levels of 8 values, the k-th ones of their group."""
    is_down = and_i32(shifted_right(kind, 1 - k % 2), integers(1))
    return select(same_i32(is_down, integers(1)), f32x16(-EIGHTH), f32x16(EIGHTH))


@njit
def shifted_moments(
    n: int,
    x: Address,
    weights: Address,
    codes: Address,
    kind: Lanes,
    factor: Lanes,
    sums: tuple[Lanes, Lanes],
) -> tuple[Lanes, Lanes]:
    """Products and squares of n values, added one by one to `sums`; levels are `factor` larger."""
    products, squares = sums
    for i in range(n):
        q = add(to_f32(sub_i32(code(codes, i), integers(1))), shift_of(kind, i // 8))
        weighted = mul(floats(weights, i), mul(q, factor))
        products = add(products, mul(weighted, floats(x, i)))
        squares = add(squares, mul(weighted, mul(q, factor)))
    return products, squares


@njit
def put_split(n: int, starts: Lanes, ends: Lanes, codes: Address, scratch: Address) -> None:
    """Codes of n values, of which `scratch` has the order."""
    for i in range(n):
        level = select_i32(above_i32(starts, integers(i)), zero_i32(), integers(1))
        level = select_i32(above_i32(ends, integers(i)), level, integers(2))
        store_i32(scratch + PLACES, 0, level)
        for lane in range(LANES):
            place = get_u8(scratch + ORDER, LANES * i + lane)
            put_u8(codes, LANES * place + lane, get_i32(scratch + PLACES, lane))


@njit
def split_group(
    n: int, j: int, x: Address, smallest: float, codes: Address, table: Address, scratch: Address
) -> None:
    """Points for group j of n values, whose weights are known.

    Its scale and how its levels are shifted are stored in scratch memory.

    Args:
        smallest: a group whose values are all nearer to 0 becomes zeros.
    """
    largest = zero_f32()
    for i in range(n):
        largest = maximum(largest, absolute(floats(x, i)))
    sort_group(n, x, scratch)
    found = split_alike(largest, scratch) if n == 32 else split_halves(largest, scratch)
    scale, starts, ends, kind = found
    is_zero = above(f32x16(np.float32(smallest)), largest)
    is_zero = either(is_zero, above_i32(zero_i32(), starts))
    put_split(n, starts, ends, codes, scratch)
    is_negative = above(zero_f32(), scale)
    for i in range(n):
        other = sub_i32(integers(2), code(codes, i))
        put_code(codes, i, select_i32(is_negative, other, code(codes, i)))
    kind = select_i32(is_negative, sub_i32(integers(BOTH_DOWN), kind), kind)
    scale = absolute(scale)
    on_grid = at_least(zero_f32(), zero_f32())
    for k in range(n // 8):
        shift = sub(mul(f32x16(TWO), shift_of(kind, k)), f32x16(np.float32(3)))
        put_floats(scratch + SHIFTS, 0, shift)
        is_point = take_points(
            x + VECTOR * 8 * k,
            scratch + VECTOR * 8 * k,
            8,
            3,
            mul(f32x16(HALF), scale),
            codes + LANES * 8 * k,
            scratch + SHIFTS,
            table,
            scratch,
        )
        on_grid = both(on_grid, is_point)
    sums = zero_f32(), zero_f32()
    products, squares = shifted_moments(n, x, scratch, codes, kind, f32x16(ONE), sums)
    changes = both(above(products, zero_f32()), above(squares, zero_f32()))
    scale = select(without(changes, on_grid), div(products, squares), scale)
    for i in range(n):
        put_code(codes, i, select_i32(is_zero, zero_i32(), code(codes, i)))
    put_floats(scratch + SCALES, j, select(is_zero, zero_f32(), scale))
    put_code(scratch + KINDS, j, select_i32(is_zero, zero_i32(), kind))


@njit
def iq1_s_block(
    x: Address, importance: Address, out: Address, scratch: Address, table: Address
) -> None:
    variance, codes = variance_of(x, 2.0), scratch + CODES
    for j in range(8):
        weigh(32, x + VECTOR * 32 * j, importance + 128 * j, variance, scratch)
        split_group(32, j, x + VECTOR * 32 * j, 1e-12, codes, table, scratch)
        upper = zero_i32()
        for k in range(4):
            point = points_of(codes + LANES * 8 * k, 8, 3, table, scratch)
            put_code(out, 2 + 4 * j + k, point)
            upper = or_i32(upper, shifted_left(shifted_right(point, 8), 3 * k))
        put_code(out, 34 + 2 * j, upper)
        put_code(out, 35 + 2 * j, shifted_right(upper, 8))
    factor, has_any = put_scale(largest_scale(8, scratch), 15, 1.125, out)
    for j in range(8):
        bits = scale_code(j, 7, factor, has_any, scratch)
        is_down = select_i32(has_any, and_i32(code(scratch + KINDS, j), integers(1)), zero_i32())
        bits = or_i32(shifted_left(bits, 4), shifted_left(is_down, 7))
        put_code(out, 35 + 2 * j, or_i32(code(out, 35 + 2 * j), bits))


@njit
def iq1_m_block(
    x: Address, importance: Address, out: Address, scratch: Address, table: Address, weighted: bool
) -> None:
    variance = variance_of(x, 2.0)
    for j in range(16):
        at, codes = x + VECTOR * 16 * j, scratch + CODES + LANES * 16 * j
        weigh_group(16, at, importance + 64 * j, variance, weighted, scratch)
        split_group(16, j, at, 1e-7, codes, table, scratch)
        low = points_of(codes, 8, 3, table, scratch)
        high = points_of(codes + LANES * 8, 8, 3, table, scratch)
        put_code(out, 2 * j, low)
        put_code(out, 2 * j + 1, high)
        upper = or_i32(shifted_right(low, 8), shifted_left(shifted_right(high, 8), 4))
        put_code(out, 32 + j, upper)
    largest = largest_scale(16, scratch)
    has_any = differs(largest, zero_f32())
    d = div(largest, f32x16(np.float32(15)))
    factor = div(f32x16(ONE), d)
    sums = zero_f32(), zero_f32()
    for j in range(16):
        at, codes = x + VECTOR * 16 * j, scratch + CODES + LANES * 16 * j
        kind = select_i32(has_any, code(scratch + KINDS, j), zero_i32())
        masks = or_i32(
            shifted_left(and_i32(kind, integers(1)), 7), shifted_left(shifted_right(kind, 1), 3)
        )
        put_code(out, 32 + j, or_i32(code(out, 32 + j), masks))
        scale = scale_code(j, 7, factor, has_any, scratch)
        put_code(scratch + SCALE_CODES, j, scale)
        weigh_group(16, at, importance + 64 * j, variance, weighted, scratch)
        level = to_f32(add_i32(add_i32(scale, scale), integers(1)))
        sums = shifted_moments(16, at, scratch, codes, kind, level, sums)
    products, squares = sums
    d = select(above(squares, zero_f32()), div(products, squares), d)
    bits = half_bits(select(has_any, mul(d, f32x16(np.float32(1.1125))), zero_f32()))
    for k in range(4):
        word = shifted_left(and_i32(shifted_right(bits, 4 * k), integers(15)), 12)
        for i in range(4):
            word = or_i32(word, shifted_left(code(scratch + SCALE_CODES, 4 * k + i), 3 * i))
        put_code(out, 48 + 2 * k, word)
        put_code(out, 49 + 2 * k, shifted_right(word, 8))


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


@njit
def encode_weighted_iq1_s(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    iq1_s_block(x, importance, out, scratch, table)


@njit
def encode_iq1_m(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    iq1_m_block(x, importance, out, scratch, table, False)


@njit
def encode_weighted_iq1_m(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    iq1_m_block(x, importance, out, scratch, table, True)


iq3_xxs = SimpleNamespace(encode=encode_iq3_xxs, encode_weighted=encode_weighted_iq3_xxs)
iq3_s = SimpleNamespace(encode=encode_iq3_s, encode_weighted=encode_weighted_iq3_s)
iq2_s = SimpleNamespace(encode=encode_iq2_s, encode_weighted=encode_weighted_iq2_s)
iq2_xs = SimpleNamespace(encode_weighted=encode_weighted_iq2_xs)
iq2_xxs = SimpleNamespace(encode_weighted=encode_weighted_iq2_xxs)
iq1_m = SimpleNamespace(encode=encode_iq1_m, encode_weighted=encode_weighted_iq1_m)
iq1_s = SimpleNamespace(encode_weighted=encode_weighted_iq1_s)
