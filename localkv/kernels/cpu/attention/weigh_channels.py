"""Decode attention, the side of V, for types with scales by channel (`shared/channel_groups.py`).

Of a group of 32 or 128 tokens the weighted sum of a channel is

    sum of p[t] (d code[t] + m)  =  d sum of p[t] code[t]  +  m sum of p[t]

so its weights are summed with the codes first, of 32 tokens at a time. Codes lie as in types by
token, lanes are channels (`attention/weigh.py`), as they are of scales and minima.

Where the CPU has 8-bit dot products, the weights of a page's tokens become 16-bit integers with one
scale (`attention/readers.py`), so that a group's products are summed exactly. Tokens that a
row doesn't see have weights of 0, and so do groups that aren't complete: their scales are not read.
"""

from __future__ import annotations

from numba import cfunc, njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.readers import (
    AT_SCALE,
    CHANNEL_DIGITS,
    CHANNEL_FACTOR,
    CHANNEL_SCALE,
    CHANNEL_START,
    CHANNEL_SUMS,
    ONE,
    fetch_next,
    put_factors,
    put_starts,
)
from localkv.kernels.cpu.attention.sizes import CHANNEL_ROW
from localkv.kernels.cpu.jit.parameters import parameter
from localkv.quant_formats import FORMATS
from localkv.simd import LANES
from localkv.simd.arithmetic import f32x16
from localkv.simd.kinds import Address, Addresses, Count, Vectors
from localkv.simd.memory import load_f16
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
    add_each,
    fma_each,
    fma_grid,
    load_grid,
    load_tuple,
    store_grid,
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
"""Rows of weights (query heads of a KV head, new tokens) of a tile."""
DIGITS = parameter("DIGITS", False)
"""Whether weights become digits."""
BLOCK, AFFINE, OFFSET = facts.BLOCK, facts.AFFINE, facts.OFFSET
VECTORS = BLOCK // LANES
PASSES = 2 if DIGITS and ROWS == 8 else 1
"""Parts of a tile that are taken one after the other: 32 sums of digits would be too many."""
N = ROWS // PASSES
"""Rows whose sums are in registers at once."""
FLOAT_SUMS = N * VECTORS
DIGIT_SUMS = N_DIGITS * FLOAT_SUMS


@njit
def split_page(out: Address, p: Address, n_groups: Count) -> None:
    """A tile's weights [ROWS, PAGE_TOKENS] of some groups of tokens, as digits if they are such,
    and their sums in each group."""
    one, largest = f32x16(ONE), zeros_f32(ROWS)
    if DIGITS:
        for t in range(0, n_groups * TOKENS, LANES):
            largest = larger_products(largest, p, t, PAGE_TOKENS, one)
        put_largest(out, CHANNEL_SCALE, CHANNEL_ROW, largest)
        put_factors(out, ROWS)
    for group in range(n_groups):
        t = group * TOKENS
        if DIGITS:
            sums, ones = zeros_i32(ROWS), (one, one)
            sums = split_products(
                sums,
                p,
                t,
                PAGE_TOKENS,
                ones,
                out,
                t // QUAD,
                CHANNEL_ROW,
                CHANNEL_DIGITS,
                CHANNEL_FACTOR,
            )
            if OFFSET:
                put_sums(out, CHANNEL_START + group, CHANNEL_ROW, sums)
                put_starts(out, ROWS, group, OFFSET)
        if AFFINE:
            both = load_tuple(p, t, PAGE_TOKENS, ROWS)
            both = add_each(both, load_tuple(p, t + LANES, PAGE_TOKENS, ROWS))
            put_float_sums(out, CHANNEL_SUMS + group, CHANNEL_ROW, both)


@njit
def load_scales(plane: Address, first: int) -> Vectors:
    """Scales or minima of a block of channels."""
    return load_f16(plane, first), load_f16(plane, first + LANES)


@njit
def add_codes(
    total: Vectors,
    digits: Address,
    planes: Addresses,
    unit: int,
    step: int,
    scales: Vectors,
    group: int,
) -> Vectors:
    """Products of a group's digits with the codes of a block of channels, times the scales; the
    units of tokens 16 to 31 are `step` further."""
    if OFFSET:
        sums = start_digits(digits, group, CHANNEL_ROW, CHANNEL_DIGITS, N, VECTORS)
    else:
        sums = zeros_i32(DIGIT_SUMS)
    for half in range(2):
        for i in range(0, LANES, QUAD):
            codes = quads(planes, unit + half * step + i)
            word = (group * TOKENS + half * LANES + i) // QUAD
            sums = dot_digits(sums, codes, digits, word, CHANNEL_ROW, CHANNEL_DIGITS)
    return add_digits(total, sums, scales, digits, AT_SCALE, CHANNEL_ROW, CHANNEL_DIGITS)


@njit
def add_values(
    total: Vectors, p: Address, planes: Addresses, unit: int, step: int, scales: Vectors, group: int
) -> Vectors:
    """Add values times weights that are floats."""
    sums = zeros_f32(FLOAT_SUMS)
    for half in range(2):
        for i in range(LANES):
            values = decode(planes, unit + half * step + i)
            token = group * TOKENS + half * LANES + i
            sums = fma_grid(sums, values, p, token, 0, PAGE_TOKENS)
    return fma_each(total, sums, scales)


@cfunc("void(" + ", ".join(["int64"] * 15) + ")")
def weigh(
    out: Address,
    p: Address,
    scratch: Address,
    plane0: Address,
    plane1: Address,
    plane2: Address,
    plane3: Address,
    codebook: Address,
    n_blocks: Count,
    n_tokens: Count,
    n_tiles: Count,
    next_k: Address,
    k_lines: Count,
    next_v: Address,
    v_lines: Count,
) -> None:
    """out[r] += sum over the tokens t of complete groups, of the first `n_tokens`, of p[r, t] V[t].

    All but counts are addresses. Arguments are the same as in `attention/weigh.py`, but

    Args:
        scratch: float32 [ROWS, CHANNEL_ROW].
    """
    planes = (plane0, plane1, plane2, plane3)
    head_dim, step = n_blocks * BLOCK, n_blocks * LANES
    n_groups = n_tokens // (PARTS * TOKENS) * PARTS
    ahead, lines = (next_k, next_v), (k_lines * 2, v_lines * 2)
    for tile in range(n_tiles):
        tile_p = p + 4 * tile * ROWS * PAGE_TOKENS
        if tile > 0:
            lines = (0, 0)
        split_page(scratch, tile_p, n_groups)
        for block in range(n_blocks):
            for group in range(n_groups):
                ahead = fetch_next(ahead, lines)
                unit = group * 2 * step + block * LANES
                first = group // PARTS * head_dim + block * BLOCK
                scales = load_scales(plane0, first)
                for part in range(PASSES):
                    row = part * N
                    at = (tile * ROWS + row) * head_dim + block * BLOCK
                    total = load_grid(out, at, LANES, head_dim, VECTORS, N)
                    rows = scratch + 4 * row * CHANNEL_ROW
                    if DIGITS:
                        total = add_codes(total, rows, planes, unit, step, scales, group)
                    else:
                        weights = tile_p + 4 * row * PAGE_TOKENS
                        total = add_values(total, weights, planes, unit, step, scales, group)
                    if AFFINE:
                        minima = load_scales(plane1, first)
                        total = fma_grid(total, minima, rows, CHANNEL_SUMS + group, 0, CHANNEL_ROW)
                    store_grid(out, at, LANES, head_dim, VECTORS, total)
