"""How the CPU's attention cuts its work, and what scratch memory that takes, without torch."""

from __future__ import annotations

from localkv.cache_layout import PAGE_TOKENS

FEW_ROWS = 16
"""Rows (new tokens * query heads of a KV head) up to which a sequence takes the decode kernels."""
BLOCK_ROWS = 96
TILE = 64
PIECES_PER_THREAD = 16


def block_scratch_floats(head_dim: int) -> int:
    """Of a thread of the prefill kernels.

    q, out, tiles of K and V; logits, maxima, sums; scales; a cache line between threads.
    """
    return 2 * (BLOCK_ROWS + TILE) * head_dim + BLOCK_ROWS * (TILE + 2) + 32 + 16


def row_scratch_floats(n_rows: int, tile: int, head_dim: int) -> int:
    """Of a thread of the decode kernels, for `n_rows` rows in tiles of `tile`.

    q, sums of its blocks, logits, scaled weights; a cache line more against false sharing.
    """
    return n_rows * (head_dim + head_dim // 16 + PAGE_TOKENS) + tile * PAGE_TOKENS + 16


def partial_floats(n_items: int, n_rows: int, head_dim: int) -> int:
    """Of the outputs, maxima and sums that the pieces of the decode kernels leave to be merged."""
    return n_items * n_rows * (head_dim + 2)
