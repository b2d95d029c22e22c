"""Decode attention, the side of K: `attention_score` for integer types, by 8-bit dot products.

A block of a row of q is 24-bit integers times a scale (`attention_queries.split_queries`), so what
codes are multiplied with has as many bits as a float. A block's products are summed exactly.
Compiled for each type of K and number of rows in a tile.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, njit

from localkv.quant_formats.cpu_cache.q8_0 import AFFINE, quads
from localkv.simd.memory import load_f16, prefetch
from localkv.simd.quads import QUAD, add_digits, dot_digits, start_digits
from localkv.simd.vector_tuple import fma_grid, store_grid, zeros_f32

ROWS = 4
"""Rows of a tile."""
PAGE = 256
BLOCK = 32
PASSES = 2 if ROWS in (6, 8) else 1
"""Parts of a tile: of a whole one there would be too many sums for two groups of tokens."""
N = ROWS // PASSES
GROUPS = 4 if N <= 2 else 2 if N <= 4 else 1
"""Groups of tokens that share what is loaded of q; 3 * N sums of each are in registers at once."""
TOTALS = N * GROUPS
WORDS = 4
"""Words of four channels in half a block."""


@njit
def load_groups(planes: Any, unit: int, step: int) -> Any:
    """Codes of 4 units of each group: values i, and values i + 16."""
    a = quads(planes, unit)
    if GROUPS == 1:
        return (a[0],), (a[1],)
    b = quads(planes, unit + step)
    if GROUPS == 2:
        return (a[0], b[0]), (a[1], b[1])
    c, d = quads(planes, unit + 2 * step), quads(planes, unit + 3 * step)
    return (a[0], b[0], c[0], d[0]), (a[1], b[1], c[1], d[1])


@njit
def load_halves(plane: Any, unit: int, step: int) -> Any:
    """Scales or minima of each group."""
    if GROUPS == 1:
        return (load_f16(plane, unit),)
    if GROUPS == 2:
        return load_f16(plane, unit), load_f16(plane, unit + step)
    return (
        load_f16(plane, unit),
        load_f16(plane, unit + step),
        load_f16(plane, unit + 2 * step),
        load_f16(plane, unit + 3 * step),
    )


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
    """As `attention_score.score`, but `q` are digit blocks [n_tiles * ROWS, n_blocks, 32 words]."""
    planes = (plane0, plane1, plane2, plane3)
    head_dim = n_blocks * BLOCK
    step = n_blocks * 16
    for group in range(0, (n_tokens + 15) // 16, GROUPS):
        for tile in range(n_tiles * PASSES):
            total = zeros_f32(TOTALS)
            for block in range(n_blocks):
                unit = group * step + block * 16
                at = tile * N * head_dim + block * BLOCK
                sums = start_digits(q, at, head_dim, N, GROUPS)
                for word in range(WORDS):
                    if tile == 0 and word % (WORDS // GROUPS) == 0:
                        for line in range(ahead_lines):
                            prefetch(ahead, line * 64)
                        ahead += ahead_lines * 64
                    low, high = load_groups(planes, unit + word * QUAD, step)
                    sums = dot_digits(sums, low, q, at + word, head_dim)
                    sums = dot_digits(sums, high, q, at + word + WORDS, head_dim)
                scales = load_halves(plane0, unit, step)
                total = add_digits(total, sums, scales, q, at, head_dim)
                if AFFINE:
                    first = tile * N * n_blocks + block
                    minima = load_halves(plane1, unit, step)
                    total = fma_grid(total, minima, q_sums, first, 0, n_blocks)
            store_grid(logits, tile * N * PAGE + group * 16, 16, PAGE, GROUPS, total)
