"""The bits per value that a cache takes in its context, with all that it holds. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from localkv.arch.spec import CacheGroup
from localkv.cache.layout import PAGE_TOKENS, group_layouts
from localkv.config import CacheConfig


def allocated_bits(cache: CacheConfig, groups: Iterable[CacheGroup], n_batch: int) -> float:
    """Bits per value of K and V in a sequence's context: packed rows with their scales, and the
    pages in f16 that are there for a tail and a sink, in relation to the context's length. Layers
    with a window count as if their packed rows were all kept.

    Args:
        n_batch: most tokens of a batch, which a tail has room for.
    """
    n_values, n_bytes = 0, 0.0
    for layout in group_layouts(cache, groups):
        group = layout.group
        n_values += len(group.layers) * group.n_kv_heads * (group.key_dim + group.value_dim)
        n_bytes += layout.row_bytes
        for pool in layout.pools(cache.n_ctx, n_batch):
            spec = layout.segments[pool.segment]
            if spec is not layout.packed:
                rows = pool.n_pages(1, None) * PAGE_TOKENS
                n_bytes += rows * layout.segment_row_bytes(spec) / cache.n_ctx
    return 8 * n_bytes / n_values
