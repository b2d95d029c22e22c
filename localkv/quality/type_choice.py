"""Which cache types are worth measuring by layer: those that no other one beats.

There are some twenty types, and each layer and side would have to be run with every one. So all
layers get a type for one side first, at once. A type that costs more than another one of at most
its size is left out; within `MARGIN`, as layers differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from localkv.arch.spec import ModelSpec
from localkv.formats import KV_FORMATS

MARGIN = 1.25
"""How much more a type may cost than one of at most its size."""


class Tried(NamedTuple):
    """What a type costs: bytes per token, and divergence."""

    size: int
    cost: float


def worth_measuring(tried: Mapping[str, Tried]) -> list[str]:
    """The types that no other beats, in their order."""
    return [
        name
        for name, one in tried.items()
        if all(
            one.cost <= MARGIN * other.cost
            for other in tried.values()
            if other is not one and other.size <= one.size
        )
    ]


def try_types(
    config: ModelSpec, names: Iterable[str], side: int, cost: Callable[[str], float]
) -> dict[str, Tried]:
    """The types with which all heads' rows are whole blocks, and what they cost.

    Args:
        side: 0 for K, 1 for V.
        cost: divergence with a type for that side of all layers.
    """
    tried = {}
    for name in names:
        rows = [
            (len(g.layers) * g.n_kv_heads, (g.key_dim, g.value_dim)[side]) for g in config.groups
        ]
        if all(dim % KV_FORMATS[name].block_size == 0 for _, dim in rows):
            size = sum(n * KV_FORMATS[name].row_bytes(dim) for n, dim in rows)
            tried[name] = Tried(size, cost(name))
    return tried
