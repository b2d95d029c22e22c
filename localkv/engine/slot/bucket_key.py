"""Which tokens take part in the same steps of decoding, that a GPU records once."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import NamedTuple

from localkv.cache.kv_cache import KVCache
from localkv.cache.ladder_pool import LadderPool
from localkv.cache.layout import PAGE_TOKENS, pages_for


class BucketKey(NamedTuple):
    """What steps have in common.

    Attributes:
        stores: of each part of a batch, whether new rows are stored in it.
        n_pages: of the longest part, as a power of two.
        empty: of each part, whether it is a rung of a ladder on which there is no page.
    """

    stores: tuple[bool, ...]
    n_pages: int
    empty: tuple[bool, ...]


def bucket_key(cache: KVCache, position: int, rungs: Seq[int] = ()) -> BucketKey:
    """Which steps a token at `position` takes part in.

    Args:
        rungs: in a cache with a budget those of the sequence's pages, up to the token's own.
    """
    growing = [rows for rows in cache.parts if rows.grows_at(position)]
    n_pages = max(pages_for(position + 1 - rows.first) for rows in growing)
    stores = (
        rows.stores_at(position) and (rows.rung is None or rows.rung == rungs[-1])
        for rows in cache.parts
    )
    empty = (rows.rung is not None and rows.rung not in rungs for rows in cache.parts)
    return BucketKey(tuple(stores), 1 << (n_pages - 1).bit_length(), tuple(empty))


def grown_keys(cache: KVCache, ladder: LadderPool) -> Iterator[tuple[BucketKey, int]]:
    """The keys of a text that grows within a budget, in turn, and positions that have them.

    Between two pages some of those before may have gone down already.
    """
    found = set[BucketKey]()
    n_pages = pages_for(cache.n_ctx)
    grown = [rungs for rungs in ladder.sizes.growth(n_pages) if rungs is not None]
    for rungs, then in pairwise([*grown, *grown[-1:]]):
        position = min(len(rungs) * PAGE_TOKENS, cache.n_ctx) - 1
        for now in (rungs, [*then[: len(rungs)], *rungs]):
            key = bucket_key(cache, position, now)
            if key not in found:
                found.add(key)
                yield key, position
