"""Measuring a KV profile: what packing K or V of a layer costs, and the best types for budgets.

A cost is the divergence from an f16 cache that K or V of one layer adds when it is packed. It is
the product of two numbers. The first is how far packing moves what the layer adds to the residual
stream: one pass measures it for all types (`layer_errors`). The second is what such a move costs:
for each layer, two runs of the model are compared with an f16 cache. One has K and V of the layer
in types that move it clearly. The other has them in f32, which changes nothing that counts:
8-bit activations answer any change with noise of their own, which would hide what good types cost.

The types of all layers are those with the least sum of costs within a budget of bits; they are then
measured together. All tokens of a chunk are one batch, which reads the rows that the cache has
stored. Layers below a changed one give the same output as with the f16 cache. So they are not run
again where a layer depends on nothing but its input and its own rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import ModelSpec
from localkv.cache.arrays import Array, Batch
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import (
    DEFAULT_SINK,
    DEFAULT_TAIL,
    group_layouts,
    in_words,
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
from localkv.engine.logprobs import NOT_FINITE
from localkv.errors import LocalKVError, UsageError
from localkv.loader.smoothing import NO_SMOOTHING, Smoothing
from localkv.model import Transformer
from localkv.quality.layer_errors import BASE, Key, Variant, layer_errors
from localkv.quality.ranges import Ranges, channel_ranges, stored_rows
from localkv.quality.scores import first_scored
from localkv.quant_formats import KV_FORMATS
from localkv.quant_formats.nuq import scaled_inliers
from localkv.quant_formats.shared.codebooks import LARGEST, STEPS, Codebook, check_codebook
from localkv.system.files import write_whole
from localkv.system.processor import usable_cores

BUDGETS = (3.0, 3.5, 3.75, 4.0, 4.25, 4.5, 4.75, 5.0, 5.25, 5.5, 6.0, 6.5, 7.0, 8.0, 8.5)
"""Bits per value for which types are found."""

ANCHORS = ("q4_0", "kv3_0", "kv2_0")
"""Types that move a layer clearly; measured for that, whatever a plan's types are."""
CLEAR = 0.05
"""The largest error of an anchor. Beyond it, divergence no longer grows with the error."""
_CACHED_VALUES = 1 << 17
"""Logits that a core works on at a time: they stay in its cache."""
NOISE_TYPE = "f32"
"""A type whose rows are nearly f16's, so that nothing but noise is measured."""
LEAST_SHARE = 0.05
"""What anchors cost at least, as a share of the noise; less can't be told from it."""


SELDOM_CHOSEN = ("q5_1", "q4_1", "kv3_1", "kv2_1", "nuq4", "nuq3", "nuq2")
"""Types that take more than half of the time that `measure` takes for all, and hardly gain: of
1,344 choices for two published models (3 to 6 bits, 512 tokens, with a tail and without) 14."""


def sensible_types() -> list[str]:
    """Types worth measuring: f16 and those with fewer bits that take no more than these, but for
    the seldom chosen. An 8-bit float costs more than `q8_0` at nearly the same bits."""
    return [
        name
        for name, fmt in KV_FORMATS.items()
        if name == BASE
        or (fmt.block_size > 1 and fmt.has_part("cpu") and name not in SELDOM_CHOSEN)
    ]


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        types: cache types, f16 among them.
        budgets: bits per value of packed rows.
        n_ctx: tokens of a chunk.
        kv_rotation: as in `CacheConfig`.
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
        """The types of `pairs`, by "K/V", without types that rows can't be stored in.

        There are none where latents are kept, as such pairs don't say which type rotated parts of
        keys have.
        """
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

    def variants(
        self, config: ModelSpec, tail: int
    ) -> tuple[dict[int, list[Variant]], dict[int, list[Variant]]]:
        """By layer, the sides and types that its rows can be of: the plan's, and anchors."""
        named, anchors = dict[int, list[Variant]](), dict[int, list[Variant]]()
        for group in config.groups:
            sides = list(enumerate((group.key_dim, group.value_dim)))
            for found, names in ((named, self.with_tail(tail)), (anchors, ANCHORS)):
                fitting = [
                    (side, name)
                    for side, dim in sides
                    for name in names
                    if dim % KV_FORMATS[name].block_size == 0
                ]
                found.update(dict.fromkeys(group.layers, fitting))
        return named, anchors


class ChunkCosts:
    """A chunk of text, and the inputs that its layers got with an f16 cache.

    Args:
        model: on a backend.
        ids: the chunk; its second half is scored.
        cache: all but its types.
        name: for people.
    """

    def __init__(
        self, model: Transformer, ids: Sequence[int], cache: CacheConfig, name: str = ""
    ) -> None:
        self.model, self.ids, self.name = model, list(ids[:-1]), name
        self.targets = np.array(ids[first_scored(len(ids)) + 1 :])
        self.cache = replace(cache, n_ctx=max(len(ids), cache.n_ctx))
        self._inputs = dict[int, NDArray[Any]]()
        self._logits = self._run(base_types(model), 0, lambda logits: logits.copy(), keep=True)

    def divergence(
        self, types: LayerTypes, cache: CacheConfig | None = None, first: int | None = None
    ) -> float:
        """The sum over scored tokens, in nats.

        Args:
            cache: another one than the chunk's, but for its types.
            first: the first layer that gives another output; None for the first of other types.

        Raises:
            LocalKVError: a logit is infinite or not a number.
        """
        if first is None:
            pairs = enumerate(zip(types, base_types(self.model), strict=True))
            changed = (i for i, (a, b) in pairs if a != b)
            first = next(changed, self.model.config.n_layers - 1)
        return self._run(types, first if self._inputs else 0, self._from_base, cache=cache)

    def _from_base(self, logits: Floats) -> float:
        """The divergence of predictions, in float32 with sums in float64: the sum over tokens of
        sum(p (x - y)) - ln sum(e^x) + ln sum(e^y), with the base's logits x and probabilities p."""
        n = max(1, _CACHED_VALUES // logits.shape[1])

        def divergence(at: int) -> float:
            base, other = self._logits[at : at + n], logits[at : at + n]
            of_base, of_other = _log_sums(base), _log_sums(other)
            p = np.exp(base - of_base[:, None].astype(np.float32))
            apart = np.einsum("ij,ij->i", p, base - other, dtype=np.float64)
            return float((apart - of_base + of_other).clip(0).sum())

        with ThreadPoolExecutor(usable_cores()) as pool:
            total = sum(pool.map(divergence, range(0, len(logits), n)))
        if not math.isfinite(total):
            raise LocalKVError(NOT_FINITE)
        return total

    def forget_inputs(self) -> None:
        """Give back their memory; from now on all layers are run."""
        self._inputs.clear()

    def _run(
        self,
        types: LayerTypes,
        first: int,
        use: Callable[[Floats], T],
        *,
        keep: bool = False,
        cache: CacheConfig | None = None,
    ) -> T:
        """What `use` makes of the logits that predict the scored tokens: float32 [scored tokens,
        n_vocab], which the next run overwrites."""
        typed = with_types(replace(cache or self.cache, n_ctx=self.cache.n_ctx), types)
        engine = Engine(self.model, typed, n_batch=len(self.ids))
        part = cast(Transformer, _Part(self.model, first, self._inputs, len(self.targets), keep))
        arrays = self.model.backend.arrays

        def work() -> T:
            logits = engine.slot.forward(part, self.ids, "all", generated=False)
            return use(arrays.to_numpy(logits))

        return engine.slot.turn(work)


def _log_sums(x: Floats) -> NDArray[np.float64]:
    """The logarithm of each row's sum of e^x."""
    largest = x.max(1, keepdims=True)
    sums = np.exp(x - largest).sum(1, dtype=np.float64)
    logs: NDArray[np.float64] = np.log(sums) + largest[:, 0]
    return logs


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


Floats = NDArray[np.float32]
T = TypeVar("T")
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
    results: Results | None = None,
) -> KVProfile:
    """The profile of a model.

    Args:
        chunks: token ids, each a sequence of its own.
        digest, text, token_seconds, bandwidth: as in `KVProfile`.
        smoothing: that the model was loaded with.
        results: of the same measurement, if one was broken off; gets all that are still measured.

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
    of_all_layers = plan.of_all_layers(model)
    steps = _Steps(on_step, Results() if results is None else results)
    steps.expect(len(chunks) * (sum(run.n_steps for run in runs) + len(of_all_layers)))
    n_scored = 0
    named = dict.fromkeys(of_all_layers, 0.0)
    held = list[ChunkCosts]()
    for number, ids in enumerate(chunks):
        chunk = ChunkCosts(model, ids, as_named, f"chunk {number}")
        n_scored += len(chunk.targets)
        held.append(chunk)
        for run in runs:
            run.add(chunk, steps)
        for name, types in of_all_layers.items():
            what = f"{name} for all layers"
            key = f"{what}, {chunk.name}"
            named[name] += steps.result(what, key, partial(chunk.divergence, types))
        chunk.forget_inputs()
    lists, uniform, costs = list[TypeList](), list[TypeList](), dict[Key, float]()
    for run in sorted(runs, key=lambda run: -run.tail):
        own = {key: total / n_scored for key, total in run.alone.items()}
        noise = run.noise / n_scored
        costs |= own
        for types, cost in best_types(model, plan, own):
            expected = cost + noise if cost else 0.0
            lists.append(run.type_list(types, expected, run.total(held, types, steps) / n_scored))
        for types, total in run.uniform.items():
            uniform.append(run.type_list(types, noise + predicted(own, types), total / n_scored))
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


class Results(dict[str, float]):
    """What was measured, by what it is of.

    With a file, each result is kept there at once, and what a measurement kept that was broken off
    is there from the start.

    Args:
        path: a file of lines of JSON; None keeps nothing.
        heading: what is measured; a file with another heading begins again.
    """

    def __init__(self, path: Path | None = None, heading: str = "") -> None:
        super().__init__()
        self.path, self._file = path, None
        if path is None:
            return
        lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
        if lines and lines[0] == json.dumps(heading):
            for line in lines[1:]:
                try:
                    name, value = json.loads(line)
                    super().__setitem__(str(name), float(value))
                except (ValueError, TypeError):
                    break  # where it was broken off
        self.n_found = len(self)
        kept = "".join(f"{json.dumps(line)}\n" for line in (heading, *self.items()))
        write_whole(path, kept.encode())

    n_found = 0
    """How many results were in the file."""

    def __setitem__(self, name: str, value: float) -> None:
        super().__setitem__(name, value)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps([name, value])}\n")

    def finish(self) -> None:
        """Remove the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class _Steps:
    """Counts runs of the model, and leaves those out whose results are there."""

    def __init__(self, on_step: OnStep, results: Results) -> None:
        self.done, self.total, self.on_step, self.results = 0, 0, on_step, results

    def expect(self, more: int) -> None:
        self.total += more

    def result(self, what: str, name: str, run: Callable[[], float]) -> float:
        """One number of a run, by its name; `what` is for people."""
        return self.results_of(what, [name], lambda: [run()])[0]

    def results_of(
        self, what: str, names: Sequence[str], run: Callable[[], Iterable[float]]
    ) -> list[float]:
        """Several numbers of a run."""
        self.done += 1
        if not all(name in self.results for name in names):
            self.on_step(self.done - 1, self.total, what)
            for name, value in zip(names, run(), strict=True):
                self.results[name] = value
        return [self.results[name] for name in names]

    def end(self) -> None:
        self.on_step(self.total, self.total, "")


class _Run:
    """What is measured with one tail.

    Attributes:
        cache: with that tail, but for its types.
        tail: its tokens.
        alone: the divergence of each layer, side and type alone, summed over scored tokens.
        noise: the largest divergence that f32 rows make in one layer, summed over scored tokens.
        uniform: the divergence of one type for K and V of all layers, where all can have it, summed
            over scored tokens.
    """

    def __init__(self, model: Transformer, plan: Plan, cache: CacheConfig, tail: int) -> None:
        self.model, self.plan, self.cache, self.tail = model, plan, cache, tail
        self.named, self.anchors = plan.variants(model.config, tail)
        self.alone = {(layer, *one): 0.0 for layer, some in self.named.items() for one in some}
        self.noise = 0.0
        self.uniform = dict.fromkeys(_uniform(model, plan.with_tail(tail)), 0.0)

    @property
    def n_steps(self) -> int:
        """Runs of the model for each chunk."""
        return 1 + 2 * len(self.named) + len(self.uniform) + len(self.plan.budgets)

    def add(self, chunk: ChunkCosts, steps: _Steps) -> None:
        """Measure with a chunk."""
        both = {
            layer: list(dict.fromkeys([*some, *self.anchors[layer]]))
            for layer, some in self.named.items()
        }
        keys = [(layer, *one) for layer, some in both.items() for one in some]
        found = steps.results_of(
            "how far each type moves each layer",
            [
                f"error {'KV'[side]} {name} {layer}, {self._where(chunk)}"
                for layer, side, name in keys
            ],
            lambda: layer_errors(self.model, chunk.ids, self.cache, both).values(),
        )
        errors = dict(zip(keys, found, strict=True))
        noises = list[float]()
        for layer, some in self.named.items():
            scale, noise = self._scale(chunk, layer, errors, steps)
            noises.append(noise)
            for one in some:
                self.alone[(layer, *one)] += scale * errors[(layer, *one)]
        self.noise += max(noises)
        for types in self.uniform:
            what = f"{next(filter(None, types))[0]} for all layers"
            self.uniform[types] += self._divergence(what, chunk, types, steps)

    def _scale(
        self, chunk: ChunkCosts, layer: int, errors: Mapping[Key, float], steps: _Steps
    ) -> tuple[float, float]:
        """What an error of 1 in a layer costs, and the noise of a change to it."""
        pair, error = [BASE, BASE], 0.0
        for side in (0, 1):
            of_side = [one for one in self.anchors[layer] if one[0] == side]
            of_side = of_side or [one for one in self.named[layer] if one[0] == side]
            moves = sorted((errors[(layer, *one)], one[1]) for one in of_side)
            if moves:
                most, pair[side] = max([move for move in moves if move[0] <= CLEAR] or moves[:1])
                error += most
        anchored, noise = (
            self._divergence(f"layer {layer}", chunk, _with_pair(self.model, layer, *types), steps)
            for types in ((pair[0], pair[1]), (NOISE_TYPE, NOISE_TYPE))
        )
        return max(anchored - noise, LEAST_SHARE * noise) / (error or 1.0), noise

    def total(self, chunks: Sequence[ChunkCosts], types: LayerTypes, steps: _Steps) -> float:
        """The divergence of types by layer, summed over all chunks."""
        what = "the best types together"
        return sum(self._divergence(what, chunk, types, steps) for chunk in chunks)

    def _divergence(self, what: str, chunk: ChunkCosts, types: LayerTypes, steps: _Steps) -> float:
        name = f"{in_words(types)}, {self._where(chunk)}"
        return steps.result(what, name, lambda: chunk.divergence(types, self.cache))

    def _where(self, chunk: ChunkCosts) -> str:
        return f"{chunk.name}, a tail of {self.tail}" if self.tail else f"{chunk.name}, no tail"

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


def _uniform(model: Transformer, names: Iterable[str]) -> list[LayerTypes]:
    """The types of all layers if K and V have one type, for each type that all of them can have."""
    dims = {dim for group in model.config.groups for dim in (group.key_dim, group.value_dim)}
    fitting = [
        name for name in names if all(dim % KV_FORMATS[name].block_size == 0 for dim in dims)
    ]
    return [tuple(pair and (name, name) for pair in base_types(model)) for name in fitting]


def _with_pair(model: Transformer, layer: int, of_k: str, of_v: str) -> LayerTypes:
    """An f16 cache, but for one layer."""
    return changed(changed(base_types(model), layer, 0, of_k), layer, 1, of_v)


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
