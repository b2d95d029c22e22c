"""Measuring a KV profile: ranges of channels, costs of types by layer, types for budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from localkv.arch.spec import ModelSpec
from localkv.cache.layout import group_layouts
from localkv.cache.profile import (
    KVProfile,
    LayerFacts,
    LayerTypes,
    SideFacts,
    TypeList,
    packed_ranges,
)
from localkv.config import CacheConfig, KVCodebook
from localkv.errors import UsageError
from localkv.formats import KV_FORMATS
from localkv.loader.smoothing import NO_SMOOTHING, Smoothing
from localkv.memory.kv_bytes import kv_values_per_token, mean_bits_of
from localkv.model import Transformer
from localkv.quality.channels import Ranges, channel_ranges, stored_rows
from localkv.quality.codebooks import learn_codebook
from localkv.quality.knapsack import Choice, Picked, frontier, within
from localkv.quality.layer_costs import BASE, ChunkCosts, base_types
from localkv.quality.type_choice import try_types, worth_measuring

BUDGETS = (3.0, 3.5, 4.0, 4.5, 4.75, 5.0, 5.25, 5.5, 6.0, 6.5, 7.0, 8.0, 8.5)
"""Bits per value for which types are found."""

Key = tuple[int, int, str]
"""A layer, a side and the type that it has alone."""
Sides = tuple[list[str], list[str]]
"""Types of K and of V."""
OnStep = Callable[[int, int, str], None]
"""(steps done, all steps, what is next)."""


def sensible_types() -> list[str]:
    """Types worth measuring: f16 and those with fewer bits that take no more than these. An 8-bit
    float costs more than `q8_0` at nearly the same bits; types with scales by channel bring a tail
    in f16, of which budgets of bits know nothing."""
    return [
        name
        for name, fmt in KV_FORMATS.items()
        if name == BASE or (fmt.shares_scale and fmt.has_part("cpu_cache"))
    ]


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        types: cache types, f16 among them.
        budgets: bits per value.
        n_ctx: tokens of a chunk.
        kv_rotation: as in `CacheConfig`.
        leaves_out: types that others beat for all layers are not measured by layer
            (`type_choice`).
        pairs: what all layers get at once besides, to compare with.
    """

    types: tuple[str, ...]
    budgets: tuple[float, ...] = BUDGETS
    n_ctx: int = 1024
    kv_rotation: str = "auto"
    leaves_out: bool = False
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def packed(self) -> list[str]:
        """The types but f16."""
        return [name for name in self.types if name != BASE]

    def least_bits(self, config: ModelSpec) -> float:
        """Bits per value of a cache of nothing but the smallest types; 0 without K and V."""
        n_bytes = sum(
            len(group.layers) * group.n_kv_heads * self._least_row_bytes(dim)
            for group in config.groups
            for dim in (group.key_dim, group.value_dim)
        )
        return 8 * n_bytes / kv_values_per_token(config) if n_bytes else 0.0

    def _least_row_bytes(self, dim: int) -> int:
        formats = [KV_FORMATS[name] for name in self.types]
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


def measure(
    model: Transformer,
    chunks: Sequence[Sequence[int]],
    plan: Plan,
    *,
    digest: str,
    text: str,
    token_seconds: float = 0.0,
    bandwidth: float = 0.0,
    smoothing: Smoothing = NO_SMOOTHING,
    on_step: OnStep = lambda done, of, what: None,
) -> KVProfile:
    """The profile of a model.

    Args:
        chunks: token ids, each a sequence of its own.
        digest, text, token_seconds, bandwidth: as in `KVProfile`.
        smoothing: that the model was loaded with.

    Raises:
        UsageError: the model has no K and V.
        LocalKVError: values or logits are not finite.
    """
    if not model.config.groups:
        raise UsageError("this model keeps no K and V, so there is nothing to measure")
    codebooks = learn_codebooks(model, chunks, plan)
    cache = CacheConfig(n_ctx=plan.n_ctx, kv_rotation=plan.kv_rotation, kv_codebooks=codebooks)
    ranges = channel_ranges(model, chunks, n_ctx=plan.n_ctx, n_batch=plan.n_ctx)
    chunk = ChunkCosts(model, chunks[0], cache)
    steps = _Steps(on_step)
    steps.expect(2 * len(plan.packed) * plan.leaves_out)
    steps.expect(len(chunks) * _n_runs(model, plan, (plan.packed, plan.packed)))
    types_of = _worth_measuring(chunk, plan, steps)
    steps.restart(len(chunks) * _n_runs(model, plan, types_of))
    keys, uniform_types = plan.keys(model, types_of), _uniform(model, types_of)
    of_all_layers = plan.of_all_layers(model)
    alone = dict.fromkeys(keys, 0.0)
    n_scored = 0
    base = base_types(model)
    uniform = dict.fromkeys((*uniform_types, *of_all_layers.values()), 0.0)
    held = list[ChunkCosts]()
    for number, ids in enumerate(chunks):
        if number:
            chunk = ChunkCosts(model, ids, cache)
        n_scored += len(chunk.targets)
        held.append(chunk)
        for layer, side, name in keys:
            steps.next(f"layer {layer}, {'KV'[side]} {name}")
            alone[layer, side, name] += chunk.divergence(_with(base, layer, side, name))
        for types in uniform:
            steps.next("all layers alike")
            uniform[types] += chunk.divergence(types)
        chunk.forget_inputs()
    costs = {key: total / n_scored for key, total in alone.items()}
    lists = []
    for types, cost in best_types(model, plan, costs):
        total = 0.0
        for chunk in held:
            steps.next("the best types together")
            total += chunk.divergence(types)
        lists.append(_type_list(model, types, cost, total / n_scored))
    steps.end()
    return KVProfile(
        model=digest,
        architecture=model.config.architecture,
        name=model.config.name,
        text=text,
        n_tokens=sum(map(len, chunks)),
        n_scored=n_scored,
        kv_rotation=plan.kv_rotation,
        token_seconds=token_seconds,
        bandwidth=bandwidth,
        smoothing=smoothing.alpha,
        layers=tuple(
            layer_facts(layer, found, costs, smoothing, codebooks)
            for layer, found in enumerate(ranges)
        ),
        lists=tuple(lists),
        uniform=tuple(
            _type_list(model, types, predicted(costs, types), total / n_scored)
            for types, total in uniform.items()
            if types in uniform_types
        ),
        pairs={name: uniform[types] / n_scored for name, types in of_all_layers.items()},
    )


def learn_codebooks(
    model: Transformer, chunks: Sequence[Sequence[int]], plan: Plan
) -> tuple[KVCodebook, ...]:
    """Those of each layer and side for the types with codebooks that are measured, for rows that
    are rotated as the cache rotates them."""
    sizes = sorted({KV_FORMATS[name].n_centroids for name in plan.types} - {0})
    if not sizes:
        return ()
    rotation = "off" if plan.kv_rotation == "off" else "on"
    return tuple(
        KVCodebook(layer, side, learn_codebook(rows, n))
        for layer, side, rows in stored_rows(model, chunks, plan.n_ctx, kv_rotation=rotation)
        for n in sizes
    )


def _worth_measuring(chunk: ChunkCosts, plan: Plan, steps: _Steps) -> Sides:
    """The types that are measured by layer, for K and for V."""
    if not plan.leaves_out:
        return plan.packed, plan.packed
    base, config = base_types(chunk.model), chunk.model.config

    def cost(name: str, side: int) -> float:
        steps.next(f"{'KV'[side]} {name} in all layers")
        changed = (name, BASE) if side == 0 else (BASE, name)
        return chunk.divergence(tuple(pair and changed for pair in base))

    tried = (try_types(config, plan.packed, side, partial(cost, side=side)) for side in (0, 1))
    of_k, of_v = map(worth_measuring, tried)
    return of_k, of_v


def _n_runs(model: Transformer, plan: Plan, types: Sides) -> int:
    """Of each chunk."""
    together = {*_uniform(model, types), *plan.of_all_layers(model).values()}
    return len(plan.keys(model, types)) + len(together) + len(plan.budgets)


class _Steps:
    """Counts runs of the model."""

    def __init__(self, on_step: OnStep) -> None:
        self.done, self.total, self.on_step = 0, 0, on_step

    def expect(self, more: int) -> None:
        self.total += more

    def restart(self, left: int) -> None:
        """Only so many more are to come."""
        self.total = self.done + left

    def next(self, what: str) -> None:
        self.on_step(self.done, self.total, what)
        self.done += 1

    def end(self) -> None:
        self.on_step(self.total, self.total, "")


def predicted(costs: dict[Key, float], types: LayerTypes) -> float:
    """The sum of what the types cost alone."""
    return sum(
        costs[layer, side, name]
        for layer, pair in enumerate(types)
        if pair is not None
        for side, name in enumerate(pair)
        if name != BASE
    )


def best_types(
    model: Transformer, plan: Plan, costs: dict[Key, float]
) -> list[tuple[LayerTypes, float]]:
    """The types of all layers with the least sum of costs for each budget, and the sum.

    Budgets that no types hold are left out, and so is one whose types are those of the one before.
    """
    items, owners = list[list[Choice]](), list[tuple[int, int, list[str]]]()
    for group in model.config.groups:
        for layer in group.layers:
            for side, dim in enumerate((group.key_dim, group.value_dim)):
                names = [n for n in plan.types if n == BASE or (layer, side, n) in costs]
                owners.append((layer, side, names))
                items.append(
                    [
                        Choice(
                            KV_FORMATS[name].row_bytes(dim) * group.n_kv_heads,
                            0.0 if name == BASE else costs[layer, side, name],
                        )
                        for name in names
                    ]
                )
    picks = frontier(items)
    n_values = kv_values_per_token(model.config)
    found = dict[Picked, None]()
    for bits in sorted(plan.budgets):
        best = within(picks, bits * n_values / 8)
        if best is not None:
            found[best] = None
    lists = []
    for pick in found:
        types = base_types(model)
        for (layer, side, names), choice in zip(owners, pick.choices, strict=True):
            types = _with(types, layer, side, names[choice])
        lists.append((types, pick.cost))
    return lists


def _with(types: LayerTypes, layer: int, side: int, name: str) -> LayerTypes:
    pair = types[layer]
    assert pair is not None
    changed = (name, pair[1]) if side == 0 else (pair[0], name)
    return (*types[:layer], changed, *types[layer + 1 :])


def _uniform(model: Transformer, types: Sides) -> list[LayerTypes]:
    """The same type for K and V of all layers, where all can have it."""
    dims = {dim for group in model.config.groups for dim in (group.key_dim, group.value_dim)}
    names = [
        name
        for name in types[0]
        if name in types[1] and all(dim % KV_FORMATS[name].block_size == 0 for dim in dims)
    ]
    return [tuple(pair and (name, name) for pair in base_types(model)) for name in names]


def _type_list(model: Transformer, types: LayerTypes, cost: float, verified: float) -> TypeList:
    cache = CacheConfig(layer_types=types)
    n_bytes = sum(layout.row_bytes for layout in group_layouts(cache, model.config.groups))
    return TypeList(types, mean_bits_of(cache, model.config), n_bytes, cost, verified)


def layer_facts(
    layer: int,
    found: tuple[Ranges, Ranges] | None,
    costs: dict[Key, float],
    smoothing: Smoothing,
    codebooks: Sequence[KVCodebook],
) -> LayerFacts | None:
    """What is known of one layer: its ranges, and its part of all layers' costs and codebooks."""
    if found is None:
        return None
    sides = []
    for side, ranges in enumerate(found):
        kld = {name: cost for (at, of, name), cost in costs.items() if (at, of) == (layer, side)}
        n_heads, n_channels = ranges.lo.shape
        exponents = (smoothing.k, smoothing.v)[side].get(layer, ())
        of_side = (b.numbers for b in codebooks if (b.layer, b.side) == (layer, "kv"[side]))
        packed = packed_ranges(ranges.lo, ranges.hi)
        sides.append(SideFacts(n_heads, n_channels, packed, kld, exponents, tuple(of_side)))
    return LayerFacts(*sides)
