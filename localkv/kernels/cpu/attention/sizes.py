"""How the CPU's attention cuts its work, and what scratch memory that takes, without torch."""

from __future__ import annotations

from localkv.cache.layout import PAGE_TOKENS

FEW_ROWS = 16
"""Rows (new tokens * query heads of a KV head) that the decode kernels take at once, or else those
of one token."""
TILE = 64
"""Tokens of K and V that the prefill kernels decode at a time; divides a page."""
BLOCK_ROWS = 96
"""Rows (new token, query head of a KV head) that share a decoded tile."""
PIECES_PER_THREAD = 16
LEAST_PARTS = 64
"""A generated token's context is cut into so many parts (of all KV heads), or into pages: enough
for many threads to be busy to the end, few enough to be cheap to merge."""
MOST_TILE_ROWS = 12
"""Rows whose products prefill kernels hold in registers at once, where there are most."""
LANES = 16


def block_scratch_floats(head_dim: int, tile_rows: int = MOST_TILE_ROWS) -> int:
    """Of a thread of the prefill kernels.

    q, out, tiles of K and V; logits; references, sums; scales; a cache line between threads.
    """
    tiles = 2 * (BLOCK_ROWS + TILE) * head_dim + tile_rows * TILE
    return tiles + BLOCK_ROWS * (1 + LANES) + 2 * LANES + 16


def row_scratch_floats(n_rows: int, tile: int, head_dim: int) -> int:
    """Of a thread of the decode kernels, for `n_rows` rows in tiles of `tile`.

    q, sums of its blocks, logits, sums of exponentials; scaled weights; a cache line more against
    false sharing.
    """
    row_floats = head_dim + head_dim // LANES + PAGE_TOKENS + LANES
    return n_rows * row_floats + tile * PAGE_TOKENS + 16


def part_pages(n_pages: int, n_kv_heads: int) -> int:
    """Pages of a part, of the `n_pages` that a generated token sees.

    Nothing else may decide, neither the batch nor the threads: sums are rounded by part.
    """
    return max(1, n_pages * n_kv_heads // LEAST_PARTS)


def most_parts(n_kv_heads: int) -> int:
    """So many parts (of all KV heads) are enough for any token; no launch has more for several."""
    return 2 * LEAST_PARTS + 2 * n_kv_heads


def partial_floats(n_parts: int, n_rows: int, head_dim: int) -> int:
    """Of the outputs, maxima and sums that the decode kernels leave of parts, to be merged."""
    return n_parts * n_rows * (head_dim + 2)
