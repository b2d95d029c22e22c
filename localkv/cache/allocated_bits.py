"""The bits per value that a cache takes in its context, with all that it holds. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from localkv.arch.spec import CacheGroup
from localkv.cache.layout import group_layouts
from localkv.config import CacheConfig


def allocated_bits(cache: CacheConfig, groups: Iterable[CacheGroup], n_batch: int) -> float:
    """Bits per value of K and V in a sequence's context.

    Those of packed rows with their scales, for which all layers count alike; and what the pages in
    f16 add that are there for a tail and a sink, in relation to the pages of an f16 cache, of which
    layers with a window keep fewer.

    Args:
        n_batch: most tokens of a batch, which a tail has room for.
    """
    n_values = packed = exact = as_f16 = 0
    for layout in group_layouts(cache, groups):
        group = layout.group
        row_values = len(group.layers) * group.n_kv_heads * (group.key_dim + group.value_dim)
        n_values += row_values
        packed += layout.row_bytes
        as_f16 += row_values * layout.most_pages(cache.n_ctx, n_batch)
        for pool in layout.pools(cache.n_ctx, n_batch):
            if layout.segments[pool.segment] is not layout.packed:
                exact += row_values * pool.n_pages(1, None)
    return 8 * packed / n_values + 16 * exact / as_f16
