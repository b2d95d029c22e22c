"""Decode attention, the side of V: the weighted sum of the tokens of one page, for one type of V.

Compiled for each type of V (the decoder) and number of rows in a tile (see `specialize`). A
vector's lanes are channels; scales lie in groups of 16 tokens, and are multiplied into the weights
first, so that the loop over tokens has none.

Where the CPU has 8-bit dot products, types of integers are read as codes, four tokens at a time.
Weights times scales become 16-bit integers (`attention/readers.py`), and a page's products are
summed exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.outliers import add_outliers_to_output
from localkv.kernels.cpu.attention.readers import (
    ONE,
    Ahead,
    Lines,
    fetch_next,
    scale_weights_of_page,
    share_of,
    split_weights,
    without,
)
from localkv.kernels.cpu.jit.parameters import parameter
from localkv.quant_formats import KV_FORMATS
from localkv.simd.arithmetic import add, f32x16, fma, lanes_below, mul, select, sum_lanes, zero_f32
from localkv.simd.kinds import Address, Addresses, Count
from localkv.simd.memory import load_f16, load_f32, store_f32
from localkv.simd.quads import QUAD, ROW_DIGITS, add_digits, dot_digits, start_digits, zeros_i32
from localkv.simd.vector import (
    MOST_SUMS,
    add_each,
    fma_each,
    fma_grid,
    load_grid,
    load_tuple,
    store_grid,
    store_tuple,
    zeros_f32,
)

FORMAT = KV_FORMATS[parameter("FORMAT", "q8_0")]
facts, codec = FORMAT.cpu_layout, FORMAT.part("cpu")
decode = codec.decode
quads: Any = getattr(codec, "quads", None)
numbers: Any = getattr(codec, "numbers", None)
ROWS = parameter("ROWS", 4)
"""Rows of weights (query heads of a KV head, new tokens) of a tile."""
DIGITS = parameter("DIGITS", False)
"""Whether weights become digit rows."""
ROW_SCALES = parameter("ROW_SCALES", 0)
"""The plane of the scales of whole rows, or 0 for none."""
ROW_MINIMA = parameter("ROW_MINIMA", 0)
"""Likewise for minima."""
OUTLIERS = getattr(facts, "OUTLIERS", 0)
"""The plane of outliers, or 0 for none."""
CODEBOOK = DIGITS and FORMAT.n_centroids > 0
"""Whether codes select from a codebook whose numbers are bytes."""
BLOCK, SCALED, AFFINE = facts.BLOCK, facts.SCALED, facts.AFFINE
OFFSET = facts.OFFSET if DIGITS else 0
OFFSET_AS_FLOAT = np.float32(OFFSET)
VECTORS = BLOCK // 16
PASSES = 2 if DIGITS and ROWS == 8 else 1
"""Parts of a tile that are taken one after the other: 32 sums of digits would be too many."""
N = ROWS // PASSES
"""Rows whose sums are in registers at once."""
SUMS = VECTORS * N
PAIRS = SUMS <= MOST_SUMS // 2
"""Whether every second token has sums of its own. Sums of one have to wait for each other."""
ROW_BYTES = PAGE_TOKENS * 4


@njit
def numbers_of(codebook: Address) -> Any:
    """The codebook as the decoder takes it."""
    if CODEBOOK:
        return numbers(codebook)
    return codebook


@njit
def scale_weights(p: Address, scaled: Address, group: int, plane: Address, place: int) -> None:
    """scaled [ROWS, PAGE_TOKENS] = p times scales, of one group of tokens."""
    scale = load_f16(plane, place)
    for row in range(ROWS):
        i = row * PAGE_TOKENS + group * 16
        store_f32(scaled, i, mul(load_f32(p, i), scale))


@njit
def add_minima(
    out: Address,
    at: int,
    n_channels: int,
    head_dim: int,
    p: Address,
    scales: Address,
    minima: Address,
    block: int,
    n_blocks: int,
    n_tokens: Count,
    scratch: Address,
) -> None:
    """out += the weighted sum of the minima of a block or a row, the same for all of its channels.
    Where codes are read OFFSET less, the scales are added OFFSET times. `scratch` has room for a
    vector of each row."""
    totals = zeros_f32(ROWS)
    for group in range((n_tokens + 15) // 16):
        place = (group * n_blocks + block) * 16
        minimum = load_f16(minima, place)
        if DIGITS:
            minimum = fma(load_f16(scales, place), f32x16(OFFSET_AS_FLOAT), minimum)
        # rows that were never written may hold NaN
        minimum = select(lanes_below(n_tokens - group * 16), minimum, zero_f32())
        totals = fma_each(totals, load_tuple(p, group * 16, PAGE_TOKENS, ROWS), (minimum,))
    store_tuple(scratch, 0, 16, totals)
    for row in range(ROWS):
        shift = f32x16(sum_lanes(load_f32(scratch, row * 16)))
        for i in range(0, n_channels, 16):
            channel = at + row * head_dim + i
            store_f32(out, channel, add(load_f32(out, channel), shift))


@njit
def weigh_block(
    out: Address,
    at: int,
    head_dim: int,
    weights: Address,
    planes: Addresses,
    block: int,
    n_tokens: Count,
    ahead: Ahead,
    ahead_lines: Lines,
) -> Ahead:
    """out += weights times the codes of a block of channels, as floats; what to fetch next."""
    n_blocks = head_dim // BLOCK
    sums = load_grid(out, at, 16, head_dim, VECTORS, ROWS)
    sums_next = zeros_f32(SUMS)
    for group in range((n_tokens + 15) // 16):
        ahead = fetch_next(ahead, ahead_lines)
        unit = (group * n_blocks + block) * 16
        i, end = 0, min(16, n_tokens - group * 16)
        if PAIRS:
            while i + 1 < end:
                token = group * 16 + i
                values = decode(planes, unit + i)
                sums = fma_grid(sums, values, weights, token, 0, PAGE_TOKENS)
                values = decode(planes, unit + i + 1)
                sums_next = fma_grid(sums_next, values, weights, token + 1, 0, PAGE_TOKENS)
                i += 2
        while i < end:
            values = decode(planes, unit + i)
            sums = fma_grid(sums, values, weights, group * 16 + i, 0, PAGE_TOKENS)
            i += 1
    store_grid(out, at, 16, head_dim, VECTORS, add_each(sums, sums_next))
    return ahead


@njit
def weigh_codes(
    out: Address,
    at: int,
    head_dim: int,
    digits: Address,
    planes: Addresses,
    block: int,
    n_tokens: Count,
    ahead: Ahead,
    ahead_lines: Lines,
) -> Ahead:
    """out += digit rows times the codes of a block of channels; what to fetch next."""
    n_blocks = head_dim // BLOCK
    for part in range(PASSES):
        row = part * N
        lines = share_of(ahead_lines, PASSES)
        if part == 0 and PASSES == 2:
            lines = without(ahead_lines, lines)
        sums = start_digits(digits, row * PAGE_TOKENS, PAGE_TOKENS, ROW_DIGITS, N, VECTORS)
        for group in range((n_tokens + 15) // 16):
            ahead = fetch_next(ahead, lines)
            unit = (group * n_blocks + block) * 16
            for i in range(16 // QUAD):
                codes = quads(planes, unit + i * QUAD)
                word = row * PAGE_TOKENS + group * (16 // QUAD) + i
                sums = dot_digits(sums, codes, digits, word, PAGE_TOKENS, ROW_DIGITS)
        first = at + row * head_dim
        total = load_grid(out, first, 16, head_dim, VECTORS, N)
        ones = (f32x16(ONE), f32x16(ONE))
        total = add_digits(total, sums, ones, digits, row * PAGE_TOKENS, PAGE_TOKENS, ROW_DIGITS)
        store_grid(out, first, 16, head_dim, VECTORS, total)
    return ahead


@cfunc("void(" + ", ".join(["int64"] * 15) + ")")
def weigh(
    out: Address,
    p: Address,
    scaled_p: Address,
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
    """out[r] += sum over the first `n_tokens` tokens t of p[r, t] V[t].

    All but counts are addresses.

    Args:
        out: float32 [n_tiles * ROWS, n_blocks * BLOCK].
        p: float32 [n_tiles * ROWS, PAGE_TOKENS], with zeros up to a multiple of 64 tokens;
            overwritten where rows of floats have scales.
        scaled_p: float32 [ROWS + 1, PAGE_TOKENS], scratch; of types with outliers at least
            `OUTLIER_ROOM`.
        plane0..3: the region of one page and KV head in each plane of V.
        codebook: float32 [16], of types with one.
        next_k, next_v: the next bytes to read of each; how many cache lines of them are fetched per
            block and group of 16 tokens.
    """
    planes = (plane0, plane1, plane2, plane3, numbers_of(codebook))
    head_dim = n_blocks * BLOCK
    n_groups = (n_tokens + 15) // 16
    ahead, lines = (next_k, next_v), (k_lines, v_lines)
    for tile in range(n_tiles):
        tile_p = p + tile * ROWS * ROW_BYTES
        if tile > 0:
            lines = (0, 0)
        if ROW_MINIMA:
            at, d, m = tile * ROWS * head_dim, planes[ROW_SCALES], planes[ROW_MINIMA]
            add_minima(out, at, head_dim, head_dim, tile_p, d, m, 0, 1, n_tokens, scaled_p)
        if DIGITS:
            of_rows = planes[ROW_SCALES] if ROW_SCALES else plane0
            n_scales = 1 if ROW_SCALES else n_blocks
            scale_weights_of_page(scaled_p, tile_p, of_rows, n_scales, n_tokens, zeros_f32(ROWS))
        if ROW_SCALES and DIGITS:  # the same weights for all blocks
            split_weights(
                scaled_p,
                tile_p,
                planes[ROW_SCALES],
                0,
                1,
                OFFSET,
                n_tokens,
                zeros_i32(ROWS),
                ahead,
                (0, 0),
            )
        elif ROW_SCALES:
            for group in range(n_groups):
                scale_weights(tile_p, tile_p, group, planes[ROW_SCALES], group * 16)
        for block in range(n_blocks):
            at = tile * ROWS * head_dim + block * BLOCK
            if AFFINE and SCALED:
                d, m = plane0, plane1
                add_minima(
                    out, at, BLOCK, head_dim, tile_p, d, m, block, n_blocks, n_tokens, scaled_p
                )
            if DIGITS and ROW_SCALES:
                ahead = weigh_codes(
                    out, at, head_dim, scaled_p, planes, block, n_tokens, ahead, lines
                )
                continue
            if DIGITS:
                early = share_of(lines, 2)
                ahead = split_weights(
                    scaled_p,
                    tile_p,
                    plane0,
                    block,
                    n_blocks,
                    OFFSET,
                    n_tokens,
                    zeros_i32(ROWS),
                    ahead,
                    early,
                )
                ahead = weigh_codes(
                    out,
                    at,
                    head_dim,
                    scaled_p,
                    planes,
                    block,
                    n_tokens,
                    ahead,
                    without(lines, early),
                )
                continue
            weights = tile_p
            if SCALED:
                weights = scaled_p
                for group in range(n_groups):
                    place = (group * n_blocks + block) * 16
                    scale_weights(tile_p, scaled_p, group, plane0, place)
            ahead = weigh_block(out, at, head_dim, weights, planes, block, n_tokens, ahead, lines)
        if OUTLIERS:
            rows = out + tile * ROWS * head_dim * 4
            zeros = zeros_f32(ROWS)
            outliers = planes[OUTLIERS]
            add_outliers_to_output(rows, tile_p, zeros, outliers, scaled_p, n_tokens, n_blocks)
