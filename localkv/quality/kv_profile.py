"""Measuring a KV profile: what packing K or V of a layer costs, and the best types for budgets.

A cost is the divergence from an f16 cache with K or V of one layer packed alone. All tokens of a
chunk are one batch, which reads the rows that the cache has stored. Layers below a changed one give
the same output as with the f16 cache, so they are not run again where a layer depends on nothing
but its input and its own rows. The types of all layers are those with the least sum of costs within
a budget of bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import ModelSpec
from localkv.cache.arrays import Array, Batch
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import (
    DEFAULT_SINK,
    DEFAULT_TAIL,
    group_layouts,
    kv_values_per_token,
    mean_bits_of,
    with_types,
)
from localkv.cache.profile import (
    KVProfile,
    LayerFacts,
    LayerTypes,
    SideFacts,
    TypeList,
    packed_ranges,
)
from localkv.config import CacheConfig, KVCodebook
from localkv.engine.engine import Engine
from localkv.engine.logprobs import score
from localkv.errors import UsageError
from localkv.loader.smoothing import NO_SMOOTHING, Smoothing
from localkv.model import Transformer
from localkv.quality.ranges import Ranges, channel_ranges, stored_rows
from localkv.quality.scores import BLOCK_VALUES, first_scored
from localkv.quant_formats import KV_FORMATS
from localkv.quant_formats.nuq import scaled_inliers
from localkv.quant_formats.shared.codebooks import LARGEST, STEPS, Codebook, check_codebook

BASE = "f16"
"""The type that others are compared with."""
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


class ChunkCosts:
    """A chunk of text, and the inputs that its layers got with an f16 cache.

    Args:
        model: on a backend.
        ids: the chunk; its second half is scored.
        cache: all but its types.
    """

    def __init__(self, model: Transformer, ids: Sequence[int], cache: CacheConfig) -> None:
        self.model, self.ids = model, list(ids[:-1])
        self.targets = np.array(ids[first_scored(len(ids)) + 1 :])
        self.cache = replace(cache, n_ctx=max(len(ids), cache.n_ctx))
        self._inputs = dict[int, NDArray[Any]]()
        base = base_types(model)
        self._logits = self._run(base, 0, keep=True)

    def divergence(self, types: LayerTypes, cache: CacheConfig | None = None) -> float:
        """The sum over scored tokens, in nats.

        Args:
            cache: another one than the chunk's, but for its types.
        """
        changed = (
            i for i, (a, b) in enumerate(zip(types, base_types(self.model), strict=True)) if a != b
        )
        first = next(changed, self.model.config.n_layers - 1)
        logits = self._run(types, first if self._inputs else 0, cache=cache)
        total, n = 0.0, max(1, BLOCK_VALUES // logits.shape[1])
        for at in range(0, len(logits), n):
            rows = slice(at, at + n)
            total += float(score(logits[rows], self.targets[rows], self._logits[rows]).kld.sum())
        return total

    def forget_inputs(self) -> None:
        """Give back their memory; from now on all layers are run."""
        self._inputs.clear()

    def _run(
        self,
        types: LayerTypes,
        first: int,
        *,
        keep: bool = False,
        cache: CacheConfig | None = None,
    ) -> NDArray[np.float32]:
        """Logits that predict the scored tokens: float32 [scored tokens, n_vocab]."""
        typed = with_types(replace(cache or self.cache, n_ctx=self.cache.n_ctx), types)
        engine = Engine(self.model, typed, n_batch=len(self.ids))
        part = cast(Transformer, _Part(self.model, first, self._inputs, len(self.targets), keep))
        arrays = self.model.backend.arrays

        def work() -> NDArray[np.float32]:
            logits = engine.slot.forward(part, self.ids, "all", generated=False)
            copied: NDArray[np.float32] = np.array(arrays.to_numpy(logits), np.float32)
            return copied

        return engine.slot.turn(work)


def base_types(model: Transformer) -> LayerTypes:
    """An f16 cache, by layer."""
    storing = {layer for group in model.config.groups for layer in group.layers}
    return tuple((BASE, BASE) if i in storing else None for i in range(model.config.n_layers))


class _Part:
    """A model from a layer on, which predicts the scored tokens only.

    Args:
        inputs: of layers, by index; filled if they are kept.
    """

    def __init__(
        self,
        model: Transformer,
        first: int,
        inputs: dict[int, NDArray[Any]],
        n_scored: int,
        keep: bool,
    ) -> None:
        self.model, self.backend, self.config = model, model.backend, model.config
        self.first, self.inputs, self.n_scored, self.keep = first, inputs, n_scored, keep

    def forward(self, batch: Batch, cache: KVCache) -> Array:
        arrays = self.backend.arrays
        n_tokens = batch.starts[-1]
        batch = replace(batch, logit_rows=arrays.int64(range(n_tokens - self.n_scored, n_tokens)))
        if not self.model.can_start_later:
            return self.model.forward(batch, cache)
        x = None
        if self.first:
            x = arrays.from_numpy(self.inputs[self.first].copy())
        return self.model.run_from(self.first, x, batch, cache, self._before)

    def _before(self, index: int, x: Array) -> None:
        if self.keep:
            self.inputs[index] = np.array(self.backend.arrays.to_numpy(x))


def predicted(costs: Mapping[Key, float], types: LayerTypes) -> float:
    """The sum of what the types cost alone."""
    return sum(
        costs[layer, side, name]
        for layer, pair in enumerate(types)
        if pair is not None
        for side, name in enumerate(pair)
        if name != BASE
    )


def best_types(
    model: Transformer, plan: Plan, costs: Mapping[Key, float]
) -> list[tuple[LayerTypes, float]]:
    """The types of all layers with the least sum of costs for each budget, and the sum.

    A budget is left out if no types hold it, or if its types are the same as for a smaller budget.
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
            types = changed(types, layer, side, names[choice])
        lists.append((types, pick.cost))
    return lists


def changed(types: LayerTypes, layer: int, side: int, name: str) -> LayerTypes:
    """The types with another one of K (side 0) or V (1) of a layer."""
    pair = types[layer]
    assert pair is not None
    other = (name, pair[1]) if side == 0 else (pair[0], name)
    return (*types[:layer], other, *types[layer + 1 :])


class Choice(NamedTuple):
    """What an item may be: its size, a whole number, and what it costs."""

    size: int
    cost: float


class Picked(NamedTuple):
    """The choice of each item by index, and the sums of sizes and of costs."""

    choices: tuple[int, ...]
    size: int
    cost: float


class _State(NamedTuple):
    size: int
    cost: float
    before: int
    choice: int


def frontier(items: Sequence[Sequence[Choice]]) -> list[Picked]:
    """The best picks for all budgets: growing sizes, falling costs.

    Raises:
        ValueError: an item has no choice.
    """
    if not all(items):
        raise ValueError("an item has no choice")
    unit = math.gcd(*(choice.size for item in items for choice in item)) or 1
    steps = [[_State(0, 0.0, 0, 0)]]
    for item in items:
        grown = [
            _State(state.size + choice.size // unit, state.cost + choice.cost, i, j)
            for i, state in enumerate(steps[-1])
            for j, choice in enumerate(item)
        ]
        steps.append(_useful(grown))
    return [_picked(steps, at, unit) for at in range(len(steps[-1]))]


def _useful(states: list[_State]) -> list[_State]:
    """The states that cost less than every other state that is no larger."""
    kept, least = list[_State](), math.inf
    for state in sorted(states):
        if state.cost < least:
            kept.append(state)
            least = state.cost
    return kept


def _picked(steps: list[list[_State]], at: int, unit: int) -> Picked:
    last = steps[-1][at]
    choices = []
    for step in reversed(steps[1:]):
        state = step[at]
        choices.append(state.choice)
        at = state.before
    return Picked(tuple(reversed(choices)), last.size * unit, last.cost)


def within(picks: Sequence[Picked], budget: float) -> Picked | None:
    """The best of a `frontier` whose size is at most `budget`; None if all are larger."""
    fitting = [pick for pick in picks if pick.size <= budget]
    return min(fitting, key=lambda pick: (pick.cost, pick.size), default=None)


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
