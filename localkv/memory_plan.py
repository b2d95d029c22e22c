"""Bytes of weights and of the KV cache, from a file's header and the formats' block sizes.

Arithmetic only: nothing is loaded and torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localkv.quant_formats import KV_FORMATS

if TYPE_CHECKING:
    from localkv.config import ModelConfig
    from localkv.loader.gguf_header import TensorInfo


@dataclass(frozen=True)
class TypeShare:
    """The tensors of a model that are of one type: how many, their values and their bytes."""

    name: str
    n_tensors: int
    n_values: int
    n_bytes: int


def weights_by_type(tensors: Iterable[TensorInfo]) -> list[TypeShare]:
    """What a file holds of each type, the largest share first."""
    groups: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.format.name, []).append(tensor)
    shares = [
        TypeShare(
            name,
            len(group),
            sum(math.prod(tensor.shape) for tensor in group),
            sum(tensor.n_bytes for tensor in group),
        )
        for name, group in groups.items()
    ]
    return sorted(shares, key=lambda share: -share.n_bytes)


def fits_head(type_name: str, config: ModelConfig) -> bool:
    """Whether a head's row is a whole number of the type's blocks."""
    return config.head_dim % KV_FORMATS[type_name].block_size == 0


def kv_side_bytes_per_token(type_name: str, config: ModelConfig) -> int:
    """Bytes that one token takes in the cache of K, or in that of V: all layers and heads."""
    return config.n_layers * config.n_kv_heads * KV_FORMATS[type_name].row_bytes(config.head_dim)


def kv_bytes_per_token(type_k: str, type_v: str, config: ModelConfig) -> int:
    """Bytes that one token takes in the KV cache."""
    return kv_side_bytes_per_token(type_k, config) + kv_side_bytes_per_token(type_v, config)
