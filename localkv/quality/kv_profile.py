"""Measuring a KV profile: ranges of channels, costs of types by layer, types for budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from localkv.cache.layer_types import with_types
from localkv.cache.layout import group_layouts
from localkv.cache.profile import (
    COUNTED_TOKENS,
    KVProfile,
    LayerFacts,
    LayerTypes,
    SideFacts,
    TypeList,
    packed_ranges,
)
from localkv.config import KVCodebook
from localkv.errors import UsageError
from localkv.formats import KV_FORMATS
from localkv.loader.smoothing import NO_SMOOTHING, Smoothing
from localkv.memory.kv_bytes import bits_after
from localkv.model import Transformer
from localkv.quality.best_types import best_types, changed, predicted
from localkv.quality.calibration_plan import Key, Plan, Sides
from localkv.quality.channels import Ranges, channel_ranges, stored_rows
from localkv.quality.codebooks import learn_codebook
from localkv.quality.layer_costs import BASE, ChunkCosts, base_types
from localkv.quality.type_choice import try_types, worth_measuring

OnStep = Callable[[int, int, str], None]
"""(steps done, all steps, what is next)."""


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
    cache = plan.cache(codebooks)
    as_named = replace(cache, kv_tail=None, kv_sink=None)
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
    uniform = dict.fromkeys(uniform_types, 0.0)
    named = dict.fromkeys(of_all_layers, 0.0)
    held = list[ChunkCosts]()
    for number, ids in enumerate(chunks):
        if number:
            chunk = ChunkCosts(model, ids, cache)
        n_scored += len(chunk.targets)
        held.append(chunk)
        for layer, side, name in keys:
            steps.next(f"layer {layer}, {'KV'[side]} {name}")
            alone[layer, side, name] += chunk.divergence(changed(base, layer, side, name))
        for types in uniform:
            steps.next("all layers alike")
            uniform[types] += chunk.divergence(types)
        for name, types in of_all_layers.items():
            steps.next(f"{name} for all layers")
            named[name] += chunk.divergence(types, as_named)
        chunk.forget_inputs()
    costs = {key: total / n_scored for key, total in alone.items()}
    lists = []
    for types, cost in best_types(model, plan, costs):
        total = 0.0
        for chunk in held:
            steps.next("the best types together")
            total += chunk.divergence(types)
        lists.append(_type_list(model, plan, types, cost, total / n_scored))
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
            _type_list(model, plan, types, predicted(costs, types), total / n_scored)
            for types, total in uniform.items()
        ),
        pairs={name: total / n_scored for name, total in named.items()},
        kv_tail=plan.kv_tail,
        kv_sink=plan.kv_sink,
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
    together = len(_uniform(model, types)) + len(plan.of_all_layers(model))
    return len(plan.keys(model, types)) + together + len(plan.budgets)


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


def _uniform(model: Transformer, types: Sides) -> list[LayerTypes]:
    """The same type for K and V of all layers, where all can have it."""
    dims = {dim for group in model.config.groups for dim in (group.key_dim, group.value_dim)}
    names = [
        name
        for name in types[0]
        if name in types[1] and all(dim % KV_FORMATS[name].block_size == 0 for dim in dims)
    ]
    return [tuple(pair and (name, name) for pair in base_types(model)) for name in names]


def _type_list(
    model: Transformer, plan: Plan, types: LayerTypes, cost: float, verified: float
) -> TypeList:
    cache, config = with_types(plan.cache(), types), model.config
    n_bytes = sum(layout.row_bytes for layout in group_layouts(cache, config.groups))
    bits = bits_after(cache, config, COUNTED_TOKENS)
    return TypeList(types, bits, n_bytes, cost, verified)


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
