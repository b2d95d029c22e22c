"""Decode attention, the side of V: the weighted sum of the tokens of one page, for one type of V.

Compiled for each type of V (the decoder) and number of rows in a tile (see `specialize`). A
vector's lanes are channels; scales lie in groups of 16 tokens, and are multiplied into the weights
first, so that the loop over tokens has none.
"""

from __future__ import annotations

from numba import cfunc

from localkv.cache.layout import PAGE_TOKENS
from localkv.formats import KV_FORMATS
from localkv.kernels.cpu.jit.parameters import parameter
from localkv.simd.arithmetic import add, f32x16, fma, lanes_below, mul, select, sum_lanes, zero_f32
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import load_f16, load_f32, prefetch, store_f32
from localkv.simd.vector_tuple import (
    MOST_SUMS,
    add_each,
    fma_grid,
    load_grid,
    store_grid,
    zeros_f32,
)

FORMAT = KV_FORMATS[parameter("FORMAT", "q8_0")]
facts, decode = FORMAT.part("cpu"), FORMAT.part("cpu_cache").decode
ROWS = parameter("ROWS", 4)
"""Rows of weights (query heads of a KV head, new tokens) whose sums are in registers at once."""
ROW_SCALES = parameter("ROW_SCALES", 0)
"""The plane of the scales of whole rows, or 0 for none."""
BLOCK, SCALED, AFFINE = facts.BLOCK, facts.SCALED, facts.AFFINE
VECTORS = BLOCK // 16
SUMS = VECTORS * ROWS
PAIRS = SUMS <= MOST_SUMS // 2
"""Whether every second token has sums of its own. Sums of one have to wait for each other."""


@cfunc("void(" + ", ".join(["int64"] * 12) + ")")
def weigh(
    out: Address,
    p: Address,
    scaled_p: Address,
    plane0: Address,
    plane1: Address,
    plane2: Address,
    plane3: Address,
    n_blocks: Count,
    n_tokens: Count,
    n_tiles: Count,
    ahead: Address,
    ahead_lines: Count,
) -> None:
    """out[r] += sum over the first `n_tokens` tokens t of p[r, t] V[t].

    All but counts are addresses.

    Args:
        out: float32 [n_tiles * ROWS, n_blocks * BLOCK].
        p: float32 [n_tiles * ROWS, PAGE_TOKENS]; overwritten where rows have scales.
        scaled_p: float32 [ROWS, PAGE_TOKENS], scratch.
        plane0..3: the region of one page and KV head in each plane of V.
        ahead: the next bytes to read; `ahead_lines` cache lines of them are fetched per block and
            group of 16 tokens.
    """
    planes = (plane0, plane1, plane2, plane3)
    head_dim = n_blocks * BLOCK
    n_groups = (n_tokens + 15) // 16
    for block in range(n_blocks):
        for tile in range(n_tiles):
            tile_p = p + tile * ROWS * PAGE_TOKENS * 4
            weights = tile_p
            at = tile * ROWS * head_dim + block * BLOCK
            if ROW_SCALES and block == 0:
                for group in range(n_groups):
                    row_scale = load_f16(planes[ROW_SCALES], group * 16)
                    for row in range(ROWS):
                        i = row * PAGE_TOKENS + group * 16
                        store_f32(tile_p, i, mul(load_f32(tile_p, i), row_scale))
            if SCALED:
                weights = scaled_p
                for group in range(n_groups):
                    scale = load_f16(plane0, (group * n_blocks + block) * 16)
                    for row in range(ROWS):
                        i = row * PAGE_TOKENS + group * 16
                        store_f32(scaled_p, i, mul(load_f32(tile_p, i), scale))
            if AFFINE:
                for row in range(ROWS):
                    total = zero_f32()
                    for group in range(n_groups):
                        minimum = load_f16(plane1, (group * n_blocks + block) * 16)
                        # rows that were never written may hold NaN
                        written = lanes_below(n_tokens - group * 16)
                        minimum = select(written, minimum, zero_f32())
                        total = fma(
                            load_f32(tile_p, row * PAGE_TOKENS + group * 16), minimum, total
                        )
                    shift = f32x16(sum_lanes(total))
                    for i in range(VECTORS):
                        channel = at + row * head_dim + i * 16
                        store_f32(out, channel, add(load_f32(out, channel), shift))
            sums = load_grid(out, at, 16, head_dim, VECTORS, ROWS)
            sums_next = zeros_f32(SUMS)
            for group in range(n_groups):
                if tile == 0:
                    for line in range(ahead_lines):
                        prefetch(ahead, line * 64)
                    ahead += ahead_lines * 64
                token, end = group * 16, min(n_tokens, group * 16 + 16)
                if PAIRS:
                    while token + 1 < end:
                        values = decode(planes, token * n_blocks + block)
                        sums = fma_grid(sums, values, weights, token, 0, PAGE_TOKENS)
                        values = decode(planes, (token + 1) * n_blocks + block)
                        sums_next = fma_grid(sums_next, values, weights, token + 1, 0, PAGE_TOKENS)
                        token += 2
                while token < end:
                    values = decode(planes, token * n_blocks + block)
                    sums = fma_grid(sums, values, weights, token, 0, PAGE_TOKENS)
                    token += 1
            store_grid(out, at, 16, head_dim, VECTORS, add_each(sums, sums_next))
