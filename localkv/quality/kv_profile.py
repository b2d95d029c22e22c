"""Measuring a KV profile: ranges of channels, costs of types by layer, types for budgets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import ModelSpec
from localkv.cache.layout import group_layouts, mean_bits_of, with_types
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
from localkv.loader.smoothing import NO_SMOOTHING, Smoothing
from localkv.model import Transformer
from localkv.quality.best_types import best_types, changed, predicted
from localkv.quality.calibration_plan import Key, Plan, Sides
from localkv.quality.channels import Ranges, channel_ranges, stored_rows
from localkv.quality.layer_costs import BASE, ChunkCosts, base_types
from localkv.quant_formats import KV_FORMATS
from localkv.quant_formats.nuq import scaled_inliers
from localkv.quant_formats.shared.codebooks import LARGEST, STEPS, Codebook, check_codebook

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
    as_named = plan.cache(codebooks)
    runs = [_Run(model, plan, plan.cache(codebooks, tail), tail) for tail in plan.tails]
    ranges = channel_ranges(model, chunks, n_ctx=plan.n_ctx, n_batch=plan.n_ctx)
    chunk = ChunkCosts(model, chunks[0], as_named)
    of_all_layers = plan.of_all_layers(model)
    steps = _Steps(on_step)
    steps.expect(sum(2 * len(run.types_of[0]) for run in runs) * plan.leaves_out)
    steps.expect(_n_steps(runs, chunks, of_all_layers))
    if plan.leaves_out:
        for run in runs:
            run.leave_out(chunk, steps)
    steps.restart(_n_steps(runs, chunks, of_all_layers))
    n_scored = 0
    named = dict.fromkeys(of_all_layers, 0.0)
    held = list[ChunkCosts]()
    for number, ids in enumerate(chunks):
        if number:
            chunk = ChunkCosts(model, ids, as_named)
        n_scored += len(chunk.targets)
        held.append(chunk)
        for run in runs:
            run.add(chunk, steps)
        for name, types in of_all_layers.items():
            steps.next(f"{name} for all layers")
            named[name] += chunk.divergence(types)
        chunk.forget_inputs()
    lists, uniform, costs = list[TypeList](), list[TypeList](), dict[Key, float]()
    for run in sorted(runs, key=lambda run: -run.tail):
        own = {key: total / n_scored for key, total in run.alone.items()}
        costs |= own
        for types, cost in best_types(model, plan, own):
            lists.append(run.type_list(types, cost, run.total(held, types, steps) / n_scored))
        for types, total in run.uniform.items():
            uniform.append(run.type_list(types, predicted(own, types), total / n_scored))
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
        uniform=tuple(uniform),
        pairs={name: total / n_scored for name, total in named.items()},
    )


def learn_codebooks(
    model: Transformer, chunks: Sequence[Sequence[int]], plan: Plan
) -> tuple[KVCodebook, ...]:
    """Learn the codebooks of each layer and side for the measured types that have codebooks.

    Rows are rotated as the cache rotates them. Rows that are no whole blocks have no codebook.
    """
    formats = {fmt.n_centroids: fmt for name in plan.types if (fmt := KV_FORMATS[name]).n_centroids}
    if not formats:
        return ()
    name = next(iter(formats.values())).name
    packed = replace(plan.cache(), type_k=name, type_v=name, type_k_rope=name)
    return tuple(
        KVCodebook(layer, side, learn_codebook(rows, n))
        for layer, side, rows in stored_rows(model, chunks, packed)
        for n in sorted(formats)
        if rows.shape[-1] % formats[n].block_size == 0
    )


class _Steps:
    """Counts runs of the model."""

    def __init__(self, on_step: OnStep) -> None:
        self.done, self.total, self.on_step = 0, 0, on_step

    def expect(self, more: int) -> None:
        self.total += more

    def restart(self, left: int) -> None:
        """Expect only `left` more runs."""
        self.total = self.done + left

    def next(self, what: str) -> None:
        self.on_step(self.done, self.total, what)
        self.done += 1

    def end(self) -> None:
        self.on_step(self.total, self.total, "")


def _n_steps(runs: Sequence[_Run], chunks: Sequence[object], named: Collection[str]) -> int:
    """Runs of the model for all chunks."""
    return len(chunks) * (sum(run.n_steps for run in runs) + len(named))


class _Run:
    """What is measured with one tail.

    Attributes:
        cache: with that tail, but for its types.
        tail: its tokens.
        types_of: the types that are measured by layer, for K and for V.
        alone: the divergence of each layer, side and type alone, summed over scored tokens.
        uniform: the divergence of one type for K and V of all layers, where all can have it, summed
            over scored tokens.
    """

    def __init__(self, model: Transformer, plan: Plan, cache: CacheConfig, tail: int) -> None:
        self.model, self.plan, self.cache, self.tail = model, plan, cache, tail
        types = list(plan.with_tail(tail))
        self._measure(types, types)

    def _measure(self, of_k: list[str], of_v: list[str]) -> None:
        self.types_of = of_k, of_v
        self.alone = dict.fromkeys(self.plan.keys(self.model, self.types_of), 0.0)
        self.uniform = dict.fromkeys(_uniform(self.model, self.types_of), 0.0)

    @property
    def n_steps(self) -> int:
        """Runs of the model for each chunk."""
        return len(self.alone) + len(self.uniform) + len(self.plan.budgets)

    def leave_out(self, chunk: ChunkCosts, steps: _Steps) -> None:
        """Measure only types that no others beat for all layers (`type_choice`)."""
        base, config = base_types(self.model), self.model.config

        def cost(name: str, side: int) -> float:
            steps.next(f"{'KV'[side]} {name} in all layers")
            pair = (name, BASE) if side == 0 else (BASE, name)
            return chunk.divergence(tuple(of and pair for of in base), self.cache)

        names = self.types_of[0]
        tried = [try_types(config, names, side, partial(cost, side=side)) for side in (0, 1)]
        self._measure(*map(worth_measuring, tried))

    def add(self, chunk: ChunkCosts, steps: _Steps) -> None:
        """Measure with a chunk."""
        base = base_types(self.model)
        for layer, side, name in self.alone:
            steps.next(f"layer {layer}, {'KV'[side]} {name}")
            types = changed(base, layer, side, name)
            self.alone[layer, side, name] += chunk.divergence(types, self.cache)
        for types in self.uniform:
            steps.next("all layers alike")
            self.uniform[types] += chunk.divergence(types, self.cache)

    def total(self, chunks: Sequence[ChunkCosts], types: LayerTypes, steps: _Steps) -> float:
        """The divergence of types by layer, summed over all chunks."""
        total = 0.0
        for chunk in chunks:
            steps.next("the best types together")
            total += chunk.divergence(types, self.cache)
        return total

    def type_list(self, types: LayerTypes, predicted: float, verified: float) -> TypeList:
        cache, config = with_types(self.cache, types), self.model.config
        return TypeList(
            types,
            mean_bits_of(cache, config),
            sum(layout.row_bytes for layout in group_layouts(cache, config.groups)),
            predicted,
            verified,
            cache.kv_tail,
            cache.kv_sink,
        )


def _uniform(model: Transformer, types: Sides) -> list[LayerTypes]:
    """The types of all layers if K and V have one type, for each type that all of them can have."""
    dims = {dim for group in model.config.groups for dim in (group.key_dim, group.value_dim)}
    names = [
        name
        for name in types[0]
        if name in types[1] and all(dim % KV_FORMATS[name].block_size == 0 for dim in dims)
    ]
    return [tuple(pair and (name, name) for pair in base_types(model)) for name in names]


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


Floats = NDArray[np.float32]

ROUNDS = 50
"""Rounds of k-means for the same scales."""
TURNS = 4
"""How many times new scales are found, and k-means is run for them."""
BINS = 1 << 14


def learn_codebook(rows: Floats, n: int) -> Codebook:
    """`n` numbers for rows: float32 [..., channels], as they are to be packed.

    The values are counted in bins, so the time does not depend on how many there are.
    """
    codebook: Codebook = ()
    for _ in range(TURNS):
        codebook = _means(scaled_inliers(rows, codebook), n, codebook)
    check_codebook(codebook)
    return codebook


def _means(values: Floats, n: int, start: Codebook) -> Codebook:
    """`n` means of values, from those before on, if there are any."""
    counts, edges = np.histogram(values.clip(-LARGEST, LARGEST), BINS, (-LARGEST, LARGEST))
    points = (edges[1:] + edges[:-1]) / 2
    below = np.concatenate(([0.0], np.cumsum(counts, dtype=np.float64)))
    moments = np.concatenate(([0.0], np.cumsum(counts * points)))
    shares = (np.arange(n) + 0.5) / n
    centres = np.array(start) if start else np.interp(shares * below[-1], below[1:], points)
    for _ in range(ROUNDS):
        borders = np.searchsorted(points, (centres[1:] + centres[:-1]) / 2)
        starts, ends = np.concatenate(([0], borders)), np.concatenate((borders, [BINS]))
        members = below[ends] - below[starts]
        sums = moments[ends] - moments[starts]
        centres = np.where(members > 0, sums / np.maximum(members, 1), centres)
    step = STEPS[n]
    parts = _distinct(np.rint(centres / step).astype(int).tolist(), LARGEST // step)
    return tuple(part * step for part in parts)


def _distinct(values: list[int], largest: int) -> Codebook:
    """Ascending numbers, changed so that none are equal and none is more than `largest` from 0."""
    values[0] = max(values[0], -largest)
    for i in range(1, len(values)):
        values[i] = max(values[i], values[i - 1] + 1)
    values[-1] = min(values[-1], largest)
    for i in reversed(range(len(values) - 1)):
        values[i] = min(values[i], values[i + 1] - 1)
    return tuple(values)
