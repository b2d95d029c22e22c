"""How the rows of matrices are shared out among threads."""

from __future__ import annotations

from typing import NamedTuple

CHUNKS_PER_THREAD = 8
"""How finely work is divided where there is little, so that threads end together."""
LEAST_BYTES = 1 << 16
"""Of weights for a thread, times the tokens. A helper costs whom it helps 1.5 us, in which memory
gives a core about half as much; where there is less for it, it is not asked."""


class Shares(NamedTuple):
    """Of some items (panels or rows).

    Attributes:
        threads: that work on them.
        chunk: items that one takes at a time.
    """

    threads: int
    chunk: int


def shares(n_items: int, n_bytes: int, n_tokens: int, most: int, n_threads: int) -> Shares:
    """Shares of items of `n_bytes` together, at most `most` at a time.

    Of the sizes that leave every thread enough chunks it is the one with which the last thread ends
    first, if chunks of one size take the same time.
    """
    threads = max(1, min(n_threads, n_items, n_bytes * n_tokens // LEAST_BYTES))
    threads = -(-n_items // -(-n_items // threads))  # more would not end sooner
    largest = max(1, min(most, n_items // (threads * CHUNKS_PER_THREAD)))

    def longest(chunk: int) -> int:
        n_whole, rest = divmod(n_items, chunk)
        return max(-(-n_whole // threads) * chunk, n_whole // threads * chunk + rest)

    sizes = range(largest, largest // 2, -1)
    return Shares(threads, min(sizes, key=longest))
