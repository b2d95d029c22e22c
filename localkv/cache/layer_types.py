"""Types of K and of V by layer: in a few words, and in a cache. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from localkv.config import CacheConfig
from localkv.formats import KV_FORMATS


def in_words(layer_types: Sequence[tuple[str, str] | None]) -> str:
    """Runs of layers with the same pair, "0-3 q8_0/q4_0, 4 q5_1/q5_1", without those of none."""
    runs = list[str]()
    for pair, items in groupby(enumerate(layer_types), key=lambda item: item[1]):
        layers = [layer for layer, _ in items]
        if pair is not None:
            span = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
            runs.append(f"{span} {'/'.join(pair)}")
    return ", ".join(runs)


def with_one_pair(cache: CacheConfig, type_k: str, type_v: str) -> CacheConfig:
    """The cache with one pair for all layers. Where it had types by layer, their tail and sink go
    with them."""
    if cache.layer_types:
        cache = replace(cache, layer_types=(), kv_tail=None, kv_sink=None)
    return replace(cache, type_k=type_k, type_v=type_v)


def with_types(cache: CacheConfig, layer_types: tuple[tuple[str, str] | None, ...]) -> CacheConfig:
    """A cache with types by layer. Its tail and its sink are left out where no layer is packed,
    which has no use for them."""
    names = {name for pair in layer_types if pair is not None for name in pair}
    formats = [KV_FORMATS[name] for name in names]
    if all(8 * fmt.block_bytes >= 16 * fmt.block_size for fmt in formats):
        cache = replace(cache, kv_tail=None, kv_sink=None)
    return replace(cache, layer_types=layer_types)
