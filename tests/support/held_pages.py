"""Whether pages of a cache are counted as they are held."""

from __future__ import annotations

from localkv.cache.kv_cache import KVCache


def check_pages(cache: KVCache) -> None:
    """Each page is free, or held by as many sequences as the pool counts."""
    for i, pool in enumerate(cache.pools):
        held = [page for sequence in cache.known() for page in sequence.held(i)]
        assert [held.count(page) for page in range(pool.n_pages)] == pool.n_holders
        assert sorted({*held} | {*pool.free}) == list(range(pool.n_pages))
        assert len(pool.free) == pool.n_pages - len({*held})
