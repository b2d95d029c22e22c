"""A cache without a model: layers that are all alike, for measurements and tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from localkv.cache.arrays import Arrays
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import SegmentSpec, uniform_layouts


def uniform_cache(
    arrays: Arrays,
    *,
    n_layers: int,
    n_kv_heads: int,
    head_dim: int,
    segments: Iterable[SegmentSpec],
    **options: Any,
) -> KVCache:
    """`options` as `KVCache` takes them."""
    layouts = uniform_layouts(
        n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim, segments=segments
    )
    return KVCache(layouts, arrays=arrays, **options)
