"""Decode attention, the side of K: logits of the tokens of one page, for one type of K.

Compiled for each type of K (the decoder) and number of rows in a tile (see `specialize`). A
page's K is ordered in groups of 16 tokens, so that a vector's lanes are tokens. Where the CPU has
8-bit dot products, types of integers take `attention_score_digits`.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, njit

from localkv.quant_formats.cpu_cache.q8_0 import AFFINE, BLOCK, SCALED, decode
from localkv.simd.memory import load_f16, prefetch
from localkv.simd.vector_tuple import (
    MOST_SUMS,
    add_each,
    fma_broadcast,
    fma_each,
    fma_grid,
    fold,
    store_tuple,
    zeros_f32,
)

ROWS = 4
"""Rows of queries (query heads of a KV head, new tokens) whose sums are in registers at once."""
ROW_SCALES = 0
"""The plane of the scales of whole rows, or 0 for none."""
PAGE = 256
SUMS = BLOCK // 16 * ROWS
GROUPS = 2 if SUMS <= MOST_SUMS // 2 else 1
"""Groups of tokens that share what is loaded of q. Sums of one have to wait for each other."""


@njit
def add_block(
    total: Any, sums: Any, planes: Any, unit: int, q_sums: Any, first: int, n_blocks: int
) -> Any:
    """The sums of one block of channels, scaled, on top of a group's logits."""
    if SCALED:
        total = fma_each(total, fold(sums, ROWS), load_f16(planes[0], unit))
    else:
        total = add_each(total, fold(sums, ROWS))
    if AFFINE:
        total = fma_broadcast(total, load_f16(planes[1], unit), q_sums, first, n_blocks)
    return total


@njit
def put_group(logits: Any, tile: int, group: int, planes: Any, total: Any) -> None:
    """Store the logits of a group, multiplied with the scales of whole rows if there are any."""
    if ROW_SCALES:
        total = fma_each(zeros_f32(ROWS), total, load_f16(planes[ROW_SCALES], group * 16))
    store_tuple(logits, tile * ROWS * PAGE + group * 16, PAGE, total)


@cfunc("void(" + ", ".join(["int64"] * 12) + ")")
def score(
    logits: Any,
    q: Any,
    q_sums: Any,
    plane0: Any,
    plane1: Any,
    plane2: Any,
    plane3: Any,
    n_blocks: Any,
    n_tokens: Any,
    n_tiles: Any,
    ahead: Any,
    ahead_lines: Any,
) -> None:
    """logits[r, t] = q[r] . K[t] for the first `n_tokens` tokens (and the rest of their groups).

    All but counts are addresses.

    Args:
        logits: float32 [n_tiles * ROWS, PAGE].
        q: float32 [n_tiles * ROWS, n_blocks * BLOCK], scaled.
        q_sums: float32 [n_tiles * ROWS, n_blocks], the sum of each block of q; AFFINE types only.
        plane0..3: the region of one page and KV head in each plane of K.
        ahead: what is read next, of which `ahead_lines` cache lines are fetched per block.
    """
    planes = (plane0, plane1, plane2, plane3)
    head_dim = n_blocks * BLOCK
    for group in range(0, (n_tokens + 15) // 16, GROUPS):
        for tile in range(n_tiles):
            total = zeros_f32(ROWS)
            total_next = zeros_f32(ROWS)
            for block in range(n_blocks):
                unit = (group * n_blocks + block) * 16
                unit_next = unit + n_blocks * 16
                at = tile * ROWS * head_dim + block * BLOCK
                sums = zeros_f32(SUMS)
                sums_next = zeros_f32(SUMS)
                for part in range(0, 16, 16 // GROUPS):
                    if tile == 0:
                        for line in range(ahead_lines):
                            prefetch(ahead, line * 64)
                        ahead += ahead_lines * 64
                    for i in range(part, part + 16 // GROUPS):
                        sums = fma_grid(sums, decode(planes, unit + i), q, at + i, 16, head_dim)
                        if GROUPS == 2:
                            values = decode(planes, unit_next + i)
                            sums_next = fma_grid(sums_next, values, q, at + i, 16, head_dim)
                first = tile * ROWS * n_blocks + block
                total = add_block(total, sums, planes, unit, q_sums, first, n_blocks)
                if GROUPS == 2:
                    total_next = add_block(
                        total_next, sums_next, planes, unit_next, q_sums, first, n_blocks
                    )
            put_group(logits, tile, group, planes, total)
            if GROUPS == 2:
                put_group(logits, tile, group + 1, planes, total_next)
