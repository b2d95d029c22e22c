"""Decode attention, the side of K: logits of the tokens of one page, for one type of K.

Compiled for each type of K (the decoder) and number of rows in a tile (see `specialize`). A
page's K is ordered in groups of 16 tokens, so that a vector's lanes are tokens.

Where the CPU has 8-bit dot products, types of integers are read as codes. A block of a row of q
then is 16-bit integers times a scale (`attention/queries.py`), and a block's products are summed
exactly.

One block of channels of one group of tokens, of a type with blocks of 32 (q4_0):

                 lanes: tokens 0 .. 15                     q, of each row
    unit 0       channels 0 and 16 of each token     x     q[0] and q[16]
    unit 1       channels 1 and 17                   x     q[1] and q[17]
    ...          (16 bytes each: a nibble for either)
    unit 15      channels 15 and 31                  x     q[15] and q[31]

As floats, a unit is HALVES = 2 vectors, and each is multiplied with one float of each row: 16 steps
of one unit, 2 sums for each row. As digits, a step takes UNITS = 4 units at once, whose 64 bytes
become two vectors (channels 0 to 3 and 16 to 19 of a token are the 4 bytes of its lane); each is
multiplied with one word of each of the 2 digits of q: STEPS = 4, and 2 sums for each row.

The constants below fit that to 32 registers. q4_0 as digits, by rows of a tile:

    ROWS    PASSES    N    SUMS    GROUPS             sums at once    TOTALS    PART
    1       1         1    2       4 (4 * 2 <= 24)    8               4         1
    3       1         3    6       4 (4 * 6 <= 24)    24              12        1
    4       1         4    8       2 (2 * 8 <= 24)    16              8         2
    6       1         6    12      2 (2 * 12 <= 24)   24              12        2
    7       1         7    14      1                  14              7         4
    8       2         4    8       2                  16              8         2

With 8 rows in one pass their 16 sums would leave room for a single group, and every word loaded of
q would be used once. With half of the rows at a time, two groups share it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.outliers import add_outliers_to_logits
from localkv.kernels.cpu.attention.readers import fetch_next
from localkv.kernels.cpu.jit.parameters import parameter
from localkv.quant_formats import KV_FORMATS
from localkv.simd.arithmetic import f32x16
from localkv.simd.kinds import Address, Addresses, Count, Vectors
from localkv.simd.memory import load_f16
from localkv.simd.quads import BLOCK_DIGITS, QUAD, add_digits, dot_digits, start_digits
from localkv.simd.quads import DIGITS as N_DIGITS
from localkv.simd.vector import MOST_SUMS, add_each, fma_each, fma_grid, store_grid, zeros_f32

FORMAT = KV_FORMATS[parameter("FORMAT", "q8_0")]
facts, codec = FORMAT.cpu_layout, FORMAT.part("cpu")
decode = codec.decode
quads: Any = getattr(codec, "quads", None)
numbers: Any = getattr(codec, "numbers", None)
ROWS = parameter("ROWS", 4)
"""Rows of queries (query heads of a KV head, new tokens) of a tile."""
DIGITS = parameter("DIGITS", False)
"""Whether q is digit blocks."""
ROW_SCALES = parameter("ROW_SCALES", 0)
"""The plane of the scales of whole rows, or 0 for none."""
ROW_MINIMA = parameter("ROW_MINIMA", 0)
"""Likewise for minima."""
OUTLIERS = getattr(facts, "OUTLIERS", 0)
"""The plane of outliers, or 0 for none."""
CODEBOOK = DIGITS and FORMAT.n_centroids > 0
"""Whether codes select from a codebook whose numbers are bytes."""
BLOCK, SCALED, AFFINE = facts.BLOCK, facts.SCALED, facts.AFFINE
OFFSET, ONE = np.float32(facts.OFFSET if DIGITS else 0), np.float32(1)
PASSES = 2 if DIGITS and ROWS == 8 and not CODEBOOK else 1
"""Parts of a tile that are taken one after the other, so that two groups of tokens have room."""
N = ROWS // PASSES
"""Rows whose sums are in registers at once."""
HALVES = BLOCK // 16
"""Vectors that a unit is decoded to."""
SUMS = N * (N_DIGITS if DIGITS else HALVES)
"""Vectors of sums that a group of tokens has."""
ROOM = 24 if DIGITS else MOST_SUMS
"""Vectors of sums that stay in registers."""
GROUPS = 4 if DIGITS and 4 * SUMS <= ROOM else 2 if 2 * SUMS <= ROOM else 1
"""Groups of tokens that share what is loaded of q. Sums of one have to wait for each other."""
TOTALS = N * GROUPS
"""Vectors of logits at hand: the sums of all blocks so far, scaled."""
UNITS = QUAD if DIGITS else 1
"""Units that are multiplied at once."""
STEPS = 16 // UNITS
PART = STEPS // GROUPS
"""Steps between two fetches of the next lines: as many fetches as there are groups."""


@njit
def of_groups(first: int, step: int) -> tuple[int, ...]:
    """Where each group's part begins."""
    if GROUPS == 1:
        return (first,)
    if GROUPS == 2:
        return first, first + step
    return first, first + step, first + 2 * step, first + 3 * step


@njit
def numbers_of(codebook: Address) -> Any:
    """The codebook as the decoder takes it."""
    if CODEBOOK:
        return numbers(codebook)
    return codebook


@njit
def load_unit(planes: Addresses, unit: int) -> Vectors:
    """Values i of a unit and, where there are two vectors, values i + 16; of digits, of 4 units."""
    if DIGITS:
        return quads(planes, unit)
    return decode(planes, unit)


@njit
def load_groups(planes: Addresses, units: tuple[int, ...], i: int) -> tuple[Vectors, ...]:
    """The vectors of `load_unit`, `i` units on, each as a tuple of groups."""
    a = load_unit(planes, units[0] + i)
    if GROUPS == 1:
        return ((a[0],),) if HALVES == 1 else ((a[0],), (a[1],))
    b = load_unit(planes, units[1] + i)
    if GROUPS == 2:
        return ((a[0], b[0]),) if HALVES == 1 else ((a[0], b[0]), (a[1], b[1]))
    c, d = load_unit(planes, units[2] + i), load_unit(planes, units[3] + i)
    return (a[0], b[0], c[0], d[0]), (a[1], b[1], c[1], d[1])


@njit
def load_scales(plane: Address, units: tuple[int, ...]) -> Vectors:
    """Scales or minima of each group."""
    a = load_f16(plane, units[0])
    if GROUPS == 1:
        return (a,)
    b = load_f16(plane, units[1])
    if GROUPS == 2:
        return a, b
    return a, b, load_f16(plane, units[2]), load_f16(plane, units[3])


@njit
def load_minima(scales: Address, minima: Address, units: tuple[int, ...]) -> Vectors:
    """Minima of each group; where codes are read OFFSET less, of the scales OFFSET more."""
    found = load_scales(minima, units)
    if DIGITS:
        offset = f32x16(OFFSET)
        offsets = (offset, offset, offset, offset)[:GROUPS]
        return fma_each(found, load_scales(scales, units), offsets)
    return found


@njit
def start_sums(q: Address, at: int, head_dim: int) -> Any:
    """What the products of a block of channels are added to: of floats, a tuple of each half."""
    if DIGITS:
        return start_digits(q, at, head_dim, BLOCK_DIGITS, N, GROUPS)
    if HALVES == 1:
        return (zeros_f32(TOTALS),)
    return zeros_f32(TOTALS), zeros_f32(TOTALS)


@njit
def add_products(sums: Any, halves: Any, q: Address, at: int, head_dim: int) -> Any:
    """A channel, or two that are 16 apart, of all rows times all groups', as floats."""
    low = fma_grid(sums[0], halves[0], q, at, 0, head_dim)
    if HALVES == 1:
        return (low,)
    return low, fma_grid(sums[1], halves[1], q, at + 16, 0, head_dim)


@njit
def add_block(
    total: Vectors,
    sums: Any,
    plane: Address,
    units: tuple[int, ...],
    q: Address,
    at: int,
    head_dim: int,
) -> Vectors:
    """The sums of a block of channels, scaled, on top of the logits."""
    if DIGITS:
        one = f32x16(ONE)
        scales = load_scales(plane, units) if SCALED else (one, one, one, one)[:GROUPS]
        return add_digits(total, sums, scales, q, at, head_dim, BLOCK_DIGITS)
    block = sums[0] if HALVES == 1 else add_each(sums[0], sums[1])
    if SCALED:
        return fma_each(total, block, load_scales(plane, units))
    return add_each(total, block)


@cfunc("void(" + ", ".join(["int64"] * 15) + ")")
def score(
    logits: Address,
    q: Address,
    q_sums: Address,
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

    All but counts are addresses.

    Args:
        logits: float32 [n_tiles * ROWS, PAGE_TOKENS].
        q: float32 [n_tiles * ROWS, n_blocks * BLOCK], scaled, or as many digit blocks of 32 words.
        q_sums: float32 [n_tiles * ROWS, n_blocks], the sum of each block of q; AFFINE types only.
            Of types with outliers q as floats.
        plane0..3: the region of one page and KV head in each plane of K.
        codebook: float32 [16], of types with one.
        next_v, next_k: the next bytes to read of each; how many cache lines of them are fetched per
            block and group of 16 tokens.
    """
    planes = (plane0, plane1, plane2, plane3, numbers_of(codebook))
    head_dim = n_blocks * BLOCK
    ahead, lines = (next_v, next_k), (v_lines, k_lines)
    for group in range(0, (n_tokens + 15) // 16, GROUPS):
        for tile in range(n_tiles * PASSES):
            total = zeros_f32(TOTALS)
            for block in range(n_blocks):
                units = of_groups((group * n_blocks + block) * 16, n_blocks * 16)
                at = tile * N * head_dim + block * BLOCK
                sums = start_sums(q, at, head_dim)
                for part in range(0, STEPS, PART):
                    if tile == 0:
                        ahead = fetch_next(ahead, lines)
                    for i in range(part, part + PART):
                        halves = load_groups(planes, units, i * UNITS)
                        if DIGITS:
                            sums = dot_digits(sums, halves[0], q, at + i, head_dim, BLOCK_DIGITS)
                            first = at + i + STEPS
                            sums = dot_digits(sums, halves[1], q, first, head_dim, BLOCK_DIGITS)
                        else:
                            sums = add_products(sums, halves, q, at + i, head_dim)
                total = add_block(total, sums, plane0, units, q, at, head_dim)
                if AFFINE and SCALED:
                    sum_at = tile * N * n_blocks + block
                    minima = load_minima(plane0, plane1, units)
                    total = fma_grid(total, minima, q_sums, sum_at, 0, n_blocks)
            if ROW_SCALES:
                of_rows = of_groups(group * 16, 16)
                scales = load_scales(planes[ROW_SCALES], of_rows)
                total = fma_each(zeros_f32(TOTALS), total, scales)
                if ROW_MINIMA:
                    minima = load_minima(planes[ROW_SCALES], planes[ROW_MINIMA], of_rows)
                    for sum_at in range(tile * N * n_blocks, tile * N * n_blocks + n_blocks):
                        total = fma_grid(total, minima, q_sums, sum_at, 0, n_blocks)
            first = tile * N * PAGE_TOKENS + group * 16
            store_grid(logits, first, 16, PAGE_TOKENS, GROUPS, total)
            if OUTLIERS:
                rows = (q_sums if DIGITS else q) + tile * N * head_dim * 4
                for g in range(GROUPS):
                    at = logits + (first + g * 16) * 4
                    add_outliers_to_logits(at, rows, N, planes[OUTLIERS], group + g, n_blocks)
