"""How the KV cache is divided, and how many bytes that takes: pages and segments, without torch.

A *page* holds `PAGE_TOKENS` rows of every layer; a *segment* is a range of token positions that is
stored in one pair of types. `KVCache` allocates by this, and the memory plan counts by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localkv.quant_formats import KV_FORMATS

PAGE_TOKENS = 256
"""Tokens of a page; attention tiles divide it."""


def pages_for(n_tokens: int) -> int:
    """Pages that hold `n_tokens` rows."""
    return -(-n_tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class SegmentSpec:
    """Token positions from `first_position` (to the next segment's) are stored in these types."""

    type_k: str
    type_v: str
    first_position: int = 0


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
