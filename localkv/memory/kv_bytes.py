"""Bytes and bits of rows of K and V: of a token, and of a full context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from localkv.cache.layout import GroupLayout, bytes_of, exact_bytes, group_layouts, kept_rows
from localkv.config import CacheConfig
from localkv.quant_formats import KV_FORMATS

if TYPE_CHECKING:
    from localkv.arch.spec import CacheGroup, ModelSpec


def fits_head(type_name: str, config: ModelSpec) -> bool:
    """Whether rows of all heads, of K and of V, are a whole number of the type's blocks."""
    size = KV_FORMATS[type_name].block_size
    return all(
        dim % size == 0
        for group in config.groups
        for dim in (group.key_dim, *(() if group.is_latent else (group.value_dim,)))
    )


def kv_side_bytes_per_token(
    side: Literal["k", "v"],
    type_name: str,
    config: ModelSpec,
    *,
    type_k_rope: str = CacheConfig.type_k_rope,
) -> int:
    """Bytes that one token takes on one side of the cache, K or V, in all layers and heads.

    If some layers see all of the context, only these count: the others' rows don't grow with it.

    Args:
        type_k_rope: type of the rotated parts of keys, which are V's side beside latents.
    """
    total = 0
    for group in growing_groups(config):
        name = type_k_rope if group.is_latent and side == "v" else type_name
        row = KV_FORMATS[name].row_bytes(group.key_dim if side == "k" else group.value_dim)
        total += len(group.layers) * group.n_kv_heads * row
    return total


def growing_groups(config: ModelSpec) -> tuple[CacheGroup, ...]:
    """The groups without a window, or all if each has one."""
    return tuple(group for group in config.groups if not group.reach) or config.groups


def context_bytes(cache: CacheConfig, config: ModelSpec, n_batch: int | None = None) -> int:
    """Bytes of the rows that a full context of one sequence has, without the rest of its pages."""
    return sum(bytes_of(*counts) for counts in _kept_rows(cache, config, n_batch))


def exact_context_bytes(cache: CacheConfig, config: ModelSpec, n_batch: int | None = None) -> int:
    """Bytes of the rows that a full context of one sequence keeps in its tails and sinks."""
    return sum(exact_bytes(*counts) for counts in _kept_rows(cache, config, n_batch))


def _kept_rows(
    cache: CacheConfig, config: ModelSpec, n_batch: int | None
) -> Iterator[tuple[GroupLayout, list[int]]]:
    for layout in group_layouts(cache, config.groups):
        yield layout, kept_rows(layout, cache.n_ctx, n_batch)


def kv_values_per_token(config: ModelSpec) -> int:
    """Values of K and V that one token has in all layers and heads."""
    return sum(
        len(group.layers) * group.n_kv_heads * (group.key_dim + group.value_dim)
        for group in config.groups
    )


def mean_bits(pair: tuple[str, str], config: ModelSpec) -> float:
    """Bits per value of K and V in all layers, scales included."""
    return mean_bits_of(CacheConfig(*pair), config)


def mean_bits_of(cache: CacheConfig, config: ModelSpec) -> float:
    """Bits per value of K and V in a cache, whose layers may have types of their own."""
    row = sum(one.row_bytes for one in group_layouts(cache, config.groups))
    return 8 * row / kv_values_per_token(config)


def kv_bytes_per_token(
    type_k: str, type_v: str, config: ModelSpec, *, type_k_rope: str = CacheConfig.type_k_rope
) -> int:
    """Bytes that one token takes in the KV cache; see `kv_side_bytes_per_token`."""
    k = kv_side_bytes_per_token("k", type_k, config)
    return k + kv_side_bytes_per_token("v", type_v, config, type_k_rope=type_k_rope)
