"""How rows of matrices are shared out: counts of what each thread gets."""

from __future__ import annotations

import pytest

from localkv.kernels.cpu.linear.products import CHUNKS_PER_THREAD, LEAST_BYTES, shares

PANEL = 18 << 10
"""Bytes of 16 rows of 2048 values as Q4_0."""
COUNTS = (1, 2, 3, 8, 64)


def loss(n_items: int, threads: int, chunk: int) -> float:
    """The share of the time in which threads have nothing left, if one takes what the other
    leaves, chunk by chunk."""
    got = [0] * threads
    for at in range(0, n_items, chunk):
        got[got.index(min(got))] += min(chunk, n_items - at)
    return 1 - n_items / (threads * max(got))


@pytest.mark.parametrize("n_threads", COUNTS)
@pytest.mark.parametrize("n_items", [1, 5, 16, 40, 128, 136, 192, 512, 1376, 2000, 8016])
def test_threads_end_together(n_items: int, n_threads: int) -> None:
    threads, chunk = shares(n_items, n_items * PANEL, 1, 8, n_threads)
    assert 1 <= threads <= min(n_threads, n_items)
    before = max(1, min(8, n_items // (threads * CHUNKS_PER_THREAD)))
    assert 1 <= chunk <= before
    assert loss(n_items, threads, chunk) <= loss(n_items, threads, before)
    if n_items >= threads * CHUNKS_PER_THREAD:
        assert loss(n_items, threads, chunk) < 0.06


def test_threads_are_not_asked_for_little() -> None:
    """256 rows for 64 threads; as many as there are, once a prompt makes more of it."""
    assert shares(16, 16 * PANEL, 1, 8, 64).threads == 16 * PANEL // LEAST_BYTES == 4
    assert shares(16, 16 * PANEL, 512, 8, 64) == (16, 1)
    assert shares(128, 128 * PANEL, 1, 8, 64) == (32, 1)
    assert shares(1, PANEL, 1, 8, 8) == (1, 1)
    assert shares(2000, 2000 * PANEL, 1, 8, 64) == (63, 2)
