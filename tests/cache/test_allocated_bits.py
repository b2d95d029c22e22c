"""Bits per value with the pages of a tail and a sink, against the bytes that are allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localkv.arch.spec import CacheGroup
from localkv.cache.layout import allocated_bits, cache_bytes, group_layouts
from localkv.config import CacheConfig

FULL = CacheGroup(2, 64, 64, 0, (0, 2))
WINDOW = CacheGroup(1, 128, 128, 300, (1,))
TYPES = (("q8_0", "q4_0"), ("q4_0", "q4_0"), ("f16", "f16"))
BITS = (2 * (8.5 + 4.5) + 2 * (4.5 + 4.5) + 2 * 32) / 12


def total(cache: CacheConfig, groups: tuple[CacheGroup, ...], n_batch: int) -> int:
    layouts = group_layouts(cache, groups)
    return sum(cache_bytes(layouts, n_ctx=cache.n_ctx, n_batch=n_batch))


@pytest.mark.parametrize("n_ctx", [10, 256, 300, 4096, 100_000])
@pytest.mark.parametrize("n_batch", [64, 512])
@pytest.mark.parametrize("groups", [(FULL, WINDOW), (replace(FULL, layers=(0, 1, 2)),)])
def test_what_a_tail_adds(n_ctx: int, n_batch: int, groups: tuple[CacheGroup, ...]) -> None:
    """Without one, types have the bits of their rows in any context, however short."""
    bare = CacheConfig(n_ctx=n_ctx, layer_types=TYPES)
    as_f16 = total(CacheConfig(n_ctx=n_ctx), groups, n_batch)
    assert allocated_bits(bare, groups, n_batch) == pytest.approx(BITS)
    tailed = replace(bare, kv_tail=64)
    added = total(tailed, groups, n_batch) - total(bare, groups, n_batch)
    assert added > 0
    wanted = BITS + 16 * added / as_f16
    assert allocated_bits(tailed, groups, n_batch) == pytest.approx(wanted)
    if len(groups) == 1:  # where all rows are kept, these are all bytes
        whole = 16 * total(tailed, groups, n_batch) / as_f16
        assert allocated_bits(tailed, groups, n_batch) == pytest.approx(whole)
