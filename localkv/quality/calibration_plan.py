"""What is measured for a KV profile: types, budgets, and the cache that types are tried in."""

from __future__ import annotations

from dataclasses import dataclass

from localkv.arch.spec import ModelSpec
from localkv.cache.layout import DEFAULT_SINK, DEFAULT_TAIL, kv_values_per_token
from localkv.cache.profile import LayerTypes
from localkv.config import CacheConfig, KVCodebook
from localkv.model import Transformer
from localkv.quality.layer_costs import BASE, base_types
from localkv.quant_formats import KV_FORMATS

BUDGETS = (3.0, 3.5, 3.75, 4.0, 4.25, 4.5, 4.75, 5.0, 5.25, 5.5, 6.0, 6.5, 7.0, 8.0, 8.5)
"""Bits per value for which types are found."""

Key = tuple[int, int, str]
"""A layer, a side and the type that it has alone."""
Sides = tuple[list[str], list[str]]
"""Types of K and of V."""


def sensible_types() -> list[str]:
    """Types worth measuring: f16 and those with fewer bits that take no more than these. An 8-bit
    float costs more than `q8_0` at nearly the same bits."""
    return [
        name
        for name, fmt in KV_FORMATS.items()
        if name == BASE or (fmt.block_size > 1 and fmt.has_part("cpu"))
    ]


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        types: cache types, f16 among them.
        budgets: bits per value of packed rows.
        n_ctx: tokens of a chunk.
        kv_rotation: as in `CacheConfig`.
        leaves_out: types that others beat for all layers are not measured by layer
            (`type_choice`).
        pairs: types of K and V that are measured for all layers at once, to compare with. Each
            pair has the tail and the sink that it has by itself.
        tails: tokens of the tail of all layers that are packed, whatever their types
            (`cache/layout.py`), so that what a layer costs depends on its own types only. All else
            is measured with each. With 0 there is no sink either, and types that need a tail are
            left out.
    """

    types: tuple[str, ...]
    budgets: tuple[float, ...] = BUDGETS
    n_ctx: int = 1024
    kv_rotation: str = "auto"
    leaves_out: bool = False
    pairs: tuple[tuple[str, str], ...] = ()
    tails: tuple[int, ...] = (0, DEFAULT_TAIL)

    @property
    def packed(self) -> list[str]:
        """The types but f16."""
        return [name for name in self.types if name != BASE]

    def with_tail(self, tail: int) -> tuple[str, ...]:
        """The types but f16 that are measured with a tail, or without one."""
        return tuple(name for name in self.packed if tail or KV_FORMATS[name].group_tokens == 1)

    def cache(self, codebooks: tuple[KVCodebook, ...] = (), tail: int | None = None) -> CacheConfig:
        """The cache, but for its types: with a tail and a sink, without, or, for None, with those
        that types have by themselves."""
        return CacheConfig(
            n_ctx=self.n_ctx,
            kv_rotation=self.kv_rotation,
            kv_codebooks=codebooks,
            kv_tail=tail,
            kv_sink=DEFAULT_SINK if tail else tail,
        )

    def least_bits(self, config: ModelSpec) -> float:
        """Bits per value of a cache of nothing but the smallest types that are measured; 0 without
        K and V."""
        n_bytes = sum(
            len(group.layers) * group.n_kv_heads * self._least_row_bytes(dim)
            for group in config.groups
            for dim in (group.key_dim, group.value_dim)
        )
        return 8 * n_bytes / kv_values_per_token(config) if n_bytes else 0.0

    def _least_row_bytes(self, dim: int) -> int:
        formats = [KV_FORMATS[name] for name in (BASE, *self.with_tail(max(self.tails)))]
        return min(fmt.row_bytes(dim) for fmt in formats if dim % fmt.block_size == 0)

    def of_all_layers(self, model: Transformer) -> dict[str, LayerTypes]:
        """The types of `pairs`, by "K/V", without those that rows can't be of; none where latents
        are kept, as such pairs don't say what rotated parts of keys are of."""
        if any(group.is_latent for group in model.config.groups):
            return {}
        sizes = [(group.key_dim, group.value_dim) for group in model.config.groups]
        return {
            "/".join(pair): tuple(of and pair for of in base_types(model))
            for pair in self.pairs
            if not any(
                dim % KV_FORMATS[name].block_size
                for dims in sizes
                for name, dim in zip(pair, dims, strict=True)
            )
        }

    def keys(self, model: Transformer, types: Sides) -> list[Key]:
        """Each layer and side, and of the types of that side those that its rows can be of."""
        return [
            (layer, side, name)
            for group in model.config.groups
            for layer in group.layers
            for side, dim in enumerate((group.key_dim, group.value_dim))
            for name in types[side]
            if dim % KV_FORMATS[name].block_size == 0
        ]
