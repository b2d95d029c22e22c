"""Decode attention, the side of K: logits of the tokens of one page, for one type of K.

Compiled for each type of K (the decoder) and number of rows in a tile (see `specialize`). A
page's K is ordered in groups of 16 tokens, so that a vector's lanes are tokens.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc

from localkv.quant_formats.cpu_cache.q8_0 import AFFINE, BLOCK, SCALED, decode
from localkv.simd.memory import load_f16, prefetch
from localkv.simd.vector_tuple import (
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
    """logits[r, t] = q[r] . K[t] for the first `n_tokens` tokens (and the rest of their group).

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
    for group in range((n_tokens + 15) // 16):
        for tile in range(n_tiles):
            total = zeros_f32(ROWS)
            for block in range(n_blocks):
                unit = (group * n_blocks + block) * 16
                if tile == 0:
                    for line in range(ahead_lines):
                        prefetch(ahead, line * 64)
                    ahead += ahead_lines * 64
                at = tile * ROWS * head_dim + block * BLOCK
                sums = zeros_f32(SUMS)
                for i in range(16):
                    sums = fma_grid(sums, decode(planes, unit + i), q, at + i, 16, head_dim)
                if SCALED:
                    total = fma_each(total, fold(sums, ROWS), load_f16(plane0, unit))
                else:
                    total = add_each(total, fold(sums, ROWS))
                if AFFINE:
                    minimum = load_f16(plane1, unit)
                    first = tile * ROWS * n_blocks + block
                    total = fma_broadcast(total, minimum, q_sums, first, n_blocks)
            if ROW_SCALES:
                scales = load_f16(planes[ROW_SCALES], group * 16)
                total = fma_each(zeros_f32(ROWS), total, scales)
            store_tuple(logits, tile * ROWS * PAGE + group * 16, PAGE, total)
