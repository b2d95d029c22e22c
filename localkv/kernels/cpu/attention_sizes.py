"""How the CPU's attention cuts its work, and what scratch memory that takes, without torch."""

from __future__ import annotations

from localkv.cache_layout import PAGE_TOKENS

FEW_ROWS = 16
"""Rows (new tokens * query heads of a KV head) up to which a sequence takes the decode kernels."""
TILE = 64
"""Tokens of K and V that the prefill kernels decode at a time; divides a page."""
BLOCK_ROWS = 96
"""Rows (new token, query head of a KV head) that share a decoded tile."""
PIECES_PER_THREAD = 16
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


def partial_floats(n_items: int, n_rows: int, head_dim: int) -> int:
    """Of the outputs, maxima and sums that the pieces of the decode kernels leave to be merged."""
    return n_items * n_rows * (head_dim + 2)
