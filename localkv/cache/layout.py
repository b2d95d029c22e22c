"""How the KV cache is divided, and how many bytes that takes: pages and segments, without torch.

A *page* holds `PAGE_TOKENS` rows of every layer; a *segment* is a range of token positions that is
stored in one pair of types. `KVCache` allocates by this, and the memory plan counts by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.formats import KV_FORMATS

PAGE_TOKENS = 256
"""Tokens of a page; attention tiles divide it."""

V_ROTATION = 64
"""Channels of V that are rotated together (llama.cpp's choice: smaller seemed better for V)."""


def pages_for(n_tokens: int) -> int:
    """Pages that hold `n_tokens` rows."""
    return -(-n_tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class SegmentSpec:
    """Token positions from `first_position` (to the next segment's) are stored in these types.

    `rotation_k` and `rotation_v` are the channels that are rotated together, or 0 for none.
    """

    type_k: str
    type_v: str
    first_position: int = 0
    rotation_k: int = 0
    rotation_v: int = 0


def cache_segments(cache: CacheConfig, head_dim: int) -> list[SegmentSpec]:
    """The segments of a cache as the user wants it, for a model with heads of `head_dim`.

    With `kv_rotation` "auto", K and V are each rotated if their type has a scale per block and
    `head_dim` is a multiple of 64, as in llama.cpp: K by the largest power of two that divides
    `head_dim`, V by 64.

    Raises:
        UsageError: `kv_rotation` is "on" and `head_dim` is not a multiple of 64.
    """
    possible = head_dim % V_ROTATION == 0
    if cache.kv_rotation == "on" and not possible:
        raise UsageError(
            f"kv_rotation 'on' needs a head_dim that is a multiple of {V_ROTATION}, "
            f"but this model's is {head_dim}",
            hint="use 'auto' or 'off'",
        )

    def rotated(type_name: str) -> bool:
        if cache.kv_rotation == "auto":
            return possible and KV_FORMATS[type_name].shares_scale
        return cache.kv_rotation == "on"

    return [
        SegmentSpec(
            cache.type_k,
            cache.type_v,
            rotation_k=head_dim & -head_dim if rotated(cache.type_k) else 0,
            rotation_v=V_ROTATION if rotated(cache.type_v) else 0,
        )
    ]


def check_cache_type(side: str, name: str, head_dim: int) -> None:
    """Refuse a cache type that does not exist or can't hold a head's row.

    Raises:
        UsageError: names the types that work.
    """
    fits = [fmt.name for fmt in KV_FORMATS.values() if head_dim % fmt.block_size == 0]
    if name not in KV_FORMATS:
        raise UsageError(f"unknown {side} cache type {name!r}", hint=f"types: {', '.join(fits)}")
    if name not in fits:
        raise UsageError(
            f"{side} cache type {name} with block size {KV_FORMATS[name].block_size} does not "
            f"divide head_dim {head_dim}",
            hint=f"use {', '.join(fits)}",
        )


def segment_bounds(specs: Sequence[SegmentSpec], n_ctx: int) -> list[tuple[int, int]]:
    """(first, end) position of each segment within a context of `n_ctx` tokens."""
    firsts = [spec.first_position for spec in specs]
    if not specs or firsts[0] != 0 or sorted(set(firsts)) != firsts:
        raise ValueError("segments must start at position 0 and be in order of position")
    ends = [*firsts[1:], n_ctx]
    return [(first, max(first, end)) for first, end in zip(firsts, ends, strict=True)]


def cache_bytes(
    specs: Sequence[SegmentSpec],
    *,
    n_layers: int,
    n_kv_heads: int,
    head_dim: int,
    n_ctx: int,
    n_sequences: int = 1,
) -> tuple[int, int]:
    """Bytes that `KVCache` allocates for K and for V."""
    k = v = 0
    for spec, (first, end) in zip(specs, segment_bounds(specs, n_ctx), strict=True):
        rows = pages_for(end - first) * PAGE_TOKENS * n_sequences * n_layers * n_kv_heads
        k += rows * KV_FORMATS[spec.type_k].row_bytes(head_dim)
        v += rows * KV_FORMATS[spec.type_v].row_bytes(head_dim)
    return k, v
