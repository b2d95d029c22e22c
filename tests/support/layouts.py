"""Groups of layers without a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localkv.arch.spec import CacheGroup, ModelSpec


def group_of(head_dim: int) -> CacheGroup:
    """One layer, one KV head, K and V of that many channels."""
    return CacheGroup(1, head_dim, head_dim, 0, (0,))


def with_attention(config: ModelSpec, **changes: Any) -> ModelSpec:
    """The model with other fields of `AttentionSpec` in all layers."""
    layers = (replace(layer, mixer=replace(layer.attention, **changes)) for layer in config.layers)
    return replace(config, layers=tuple(layers))
