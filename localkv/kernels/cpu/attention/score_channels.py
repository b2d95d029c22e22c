"""Decode attention, the side of K, for types with scales by channel (`shared/channel_groups.py`).

Of a group of 32 or 128 tokens a logit is

    sum of q[c] (d[c] code[c] + m[c])  =  sum of (q[c] d[c]) code[c]  +  sum of q[c] m[c]

so q is multiplied by the channels' scales first, once for the group: then the loop over channels
has no scale, and the minima add one number for all tokens. 32 tokens are taken at a time. Codes lie
as in types by token, lanes are tokens (`attention/score.py`).

Where the CPU has 8-bit dot products, products of q and d become 16-bit integers with one scale for
all channels (`attention/readers.py`), so that a logit's products are summed exactly. That scale is
the largest magnitude of q times the largest of d, which bound the products. To find the largest
product of each row would take a third of the time of all products with codes. The largest d of all
groups of a page come first, as each waits for a chain of instructions, which then run side by side.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.readers import (
    AT_SCALE,
    CHANNEL_DIGITS,
    CHANNEL_FACTOR,
    CHANNEL_SCALE,
    CHANNEL_START,
    CHANNEL_SUMS,
    GROUP_INVERSES,
    GROUP_SCALES,
    ONE,
    SMALLEST,
    ZERO,
    fetch_next,
    put_factors,
    put_starts,
)
from localkv.kernels.cpu.attention.sizes import CHANNEL_ROW
from localkv.kernels.cpu.jit.parameters import parameter
from localkv.quant_formats import FORMATS
from localkv.simd import LANES
from localkv.simd.arithmetic import f32x16, larger_magnitudes, largest_of_lanes, mul, zero_f32
from localkv.simd.kinds import Address, Addresses, Count, Vectors
from localkv.simd.memory import get_f32, load_f16, put_f32
from localkv.simd.quads import DIGITS as N_DIGITS
from localkv.simd.quads import (
    QUAD,
    add_digits,
    dot_digits,
    larger_products,
    put_float_sums,
    put_largest,
    put_sums,
    split_products,
    start_digits,
    zeros_i32,
)
from localkv.simd.vector import (
    MOST_SUMS,
    add_each,
    fma_each,
    fma_grid,
    load_tuple,
    mul_add_all,
    store_grid,
    store_tuple,
    zeros_f32,
)

FORMAT = FORMATS[parameter("FORMAT", "q8_0c")]
facts, codec = FORMAT.cpu_layout, FORMAT.part("cpu")
decode, quads = codec.decode, codec.quads
TOKENS = 2 * LANES
"""Tokens that are taken at a time."""
PARTS = FORMAT.group_tokens // TOKENS
"""Such parts of a group of tokens that share scales."""
ROWS = parameter("ROWS", 4)
"""Rows of queries (query heads of a KV head, new tokens) of a tile."""
DIGITS = parameter("DIGITS", False)
"""Whether q becomes digits."""
BLOCK, AFFINE, OFFSET = facts.BLOCK, facts.AFFINE, facts.OFFSET
PASSES = 2 if DIGITS and ROWS == 8 else 1
"""Parts of a tile that are taken one after the other, so that both halves of a group have room."""
N = ROWS // PASSES
"""Rows whose sums are in registers at once."""
VECTORS = N * 2
"""Vectors of sums that 16 tokens have: of two digits, or of channels 0 to 15 and 16 to 31."""
HALVES = 2 if (24 if DIGITS else MOST_SUMS) >= 2 * VECTORS else 1
"""Halves of a group of tokens that share what is loaded of q."""
TOTALS = N * HALVES
DIGIT_SUMS = N_DIGITS * TOTALS
UNITS = QUAD if DIGITS else 1
"""Units that are multiplied at once."""


@njit
def measure_queries(out: Address, q: Address, head_dim: int) -> None:
    """Put the scale and the factor of a tile's rows of q in `out`, rows as
    `attention/readers.py` has them."""
    largest, one = zeros_f32(ROWS), f32x16(ONE)
    for c in range(0, head_dim, LANES):
        largest = larger_products(largest, q, c, head_dim, one)
    put_largest(out, CHANNEL_SCALE, CHANNEL_ROW, largest)
    put_factors(out, ROWS)


@njit(error_model="numpy")
def measure_group(out: Address, q: Address, planes: Addresses, group: int, head_dim: int) -> None:
    """What a group of tokens that share scales needs.

    That is the largest scale of its channels, NaN if one isn't finite, and its inverse; and the
    sums of a tile's rows of q with its minima.
    """
    shifts, largest, first = zeros_f32(ROWS), zero_f32(), group * head_dim
    for c in range(0, head_dim, LANES):
        if DIGITS:
            largest = larger_magnitudes(load_f16(planes[0], first + c), largest)
        if AFFINE:
            m = load_f16(planes[1], first + c)
            shifts = fma_each(shifts, load_tuple(q, c, head_dim, ROWS), (m,))
    if AFFINE:
        put_float_sums(out, CHANNEL_SUMS + group, CHANNEL_ROW, shifts)
    if DIGITS:
        top = largest_of_lanes(largest)
        scale = max(top, SMALLEST) + top * ZERO
        put_f32(out, GROUP_SCALES + group, scale)
        put_f32(out, GROUP_INVERSES + group, ONE / scale)


@njit
def scale_queries(out: Address, q: Address, planes: Addresses, group: int, head_dim: int) -> None:
    """A tile's rows of q times the channels' scales in a group of tokens: as digits, or with floats
    in their place."""
    sums, first = zeros_i32(ROWS), group * head_dim
    inverse = f32x16(get_f32(out, GROUP_INVERSES + group) if DIGITS else ONE)
    for c in range(0, head_dim, BLOCK):
        low, high = load_f16(planes[0], first + c), load_f16(planes[0], first + c + LANES)
        if DIGITS:
            d = mul(low, inverse), mul(high, inverse)
            sums = split_products(
                sums, q, c, head_dim, d, out, c // QUAD, CHANNEL_ROW, CHANNEL_DIGITS, CHANNEL_FACTOR
            )
        else:
            x = mul_add_all(load_tuple(q, c, head_dim, ROWS), low, zero_f32())
            store_tuple(out, c, CHANNEL_ROW, x)
            x = mul_add_all(load_tuple(q, c + LANES, head_dim, ROWS), high, zero_f32())
            store_tuple(out, c + LANES, CHANNEL_ROW, x)
    if DIGITS and OFFSET:
        put_sums(out, CHANNEL_START, CHANNEL_ROW, sums)
        put_starts(out, ROWS, 0, OFFSET)


@njit
def load_unit(planes: Addresses, unit: int) -> Vectors:
    """Values i of a unit, and values i + 16; of digits, of 4 units."""
    if DIGITS:
        return quads(planes, unit)
    return decode(planes, unit)


@njit
def load_halves(planes: Addresses, unit: int, step: int) -> tuple[Vectors, ...]:
    """The vectors of `load_unit`, each as a tuple of the halves of a group of tokens."""
    a = load_unit(planes, unit)
    if HALVES == 1:
        return (a[0],), (a[1],)
    b = load_unit(planes, unit + step)
    return (a[0], b[0]), (a[1], b[1])


@njit
def start_sums(q: Address, at: int) -> Any:
    """What products are added to: of floats, a tuple for each half of a block of channels."""
    if not DIGITS:
        return zeros_f32(TOTALS), zeros_f32(TOTALS)
    if OFFSET:
        return start_digits(q, at, CHANNEL_ROW, CHANNEL_DIGITS, N, HALVES)
    return zeros_i32(DIGIT_SUMS)


@njit
def add_products(sums: Any, codes: Any, q: Address, at: int, i: int) -> Any:
    """Channels `i` and `i` + 16 of a block, or four of either, of all rows and halves."""
    if DIGITS:
        word = at + i // QUAD
        sums = dot_digits(sums, codes[0], q, word, CHANNEL_ROW, CHANNEL_DIGITS)
        word += LANES // QUAD
        return dot_digits(sums, codes[1], q, word, CHANNEL_ROW, CHANNEL_DIGITS)
    low = fma_grid(sums[0], codes[0], q, at + i, 0, CHANNEL_ROW)
    return low, fma_grid(sums[1], codes[1], q, at + i + LANES, 0, CHANNEL_ROW)


@njit
def add_shifts(sums: Any, q: Address, at: int, group: int) -> Vectors:
    """The sums of products as floats, and the sums with the minima of a group."""
    total = zeros_f32(TOTALS)
    if AFFINE:
        ones = (f32x16(ONE), f32x16(ONE))[:HALVES]
        total = fma_grid(total, ones, q, at + CHANNEL_SUMS + group, 0, CHANNEL_ROW)
    if DIGITS:
        scale = f32x16(get_f32(q, GROUP_SCALES + group))
        scales = (scale, scale)[:HALVES]
        return add_digits(total, sums, scales, q, at + AT_SCALE, CHANNEL_ROW, CHANNEL_DIGITS)
    return add_each(total, add_each(sums[0], sums[1]))


@cfunc("void(" + ", ".join(["int64"] * 15) + ")")
def score(
    logits: Address,
    q: Address,
    scratch: Address,
    plane0: Address,
    plane1: Address,
    plane2: Address,
    plane3: Address,
    codebook: Address,
    n_blocks: Count,
    n_tokens: Count,
    n_tiles: Count,
    next_v: Address,
    v_lines: Count,
    next_k: Address,
    k_lines: Count,
) -> None:
    """logits[r, t] = q[r] . K[t] for the first `n_tokens` tokens (and the rest of their groups).

    All but counts are addresses. Arguments are the same as in `attention/score.py`, but

    Args:
        q: float32 [n_tiles * ROWS, n_blocks * BLOCK], scaled.
        scratch: float32 [ROWS, CHANNEL_ROW].
    """
    planes = (plane0, plane1, plane2, plane3)
    head_dim, step = n_blocks * BLOCK, n_blocks * LANES
    ahead, lines = (next_v, next_k), (v_lines * HALVES, k_lines * HALVES)
    n_groups = (n_tokens + TOKENS - 1) // TOKENS
    for tile in range(n_tiles):
        rows = q + 4 * tile * ROWS * head_dim
        if DIGITS:
            measure_queries(scratch, rows, head_dim)
        for group in range(0, n_groups, PARTS):
            measure_group(scratch, rows, planes, group // PARTS, head_dim)
        for group in range(n_groups):
            if group % PARTS == 0:
                scale_queries(scratch, rows, planes, group // PARTS, head_dim)
            for part in range(PASSES):
                at = part * N * CHANNEL_ROW
                for half in range(0, 2, HALVES):
                    sums = start_sums(scratch, at)
                    for block in range(n_blocks):
                        if tile == 0 and part == 0:
                            ahead = fetch_next(ahead, lines)
                        unit = (group * 2 + half) * step + block * LANES
                        word = at + block * BLOCK // (QUAD if DIGITS else 1)
                        for i in range(0, LANES, UNITS):
                            codes = load_halves(planes, unit + i, step)
                            sums = add_products(sums, codes, scratch, word, i)
                    total = add_shifts(sums, scratch, at, group // PARTS)
                    where = (tile * ROWS + part * N) * PAGE_TOKENS + group * TOKENS + half * LANES
                    store_grid(logits, where, LANES, PAGE_TOKENS, HALVES, total)
