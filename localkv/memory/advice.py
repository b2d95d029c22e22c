"""What fits a budget: every pair of cache types, other types of weights, and a recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localkv.cache.ladder import Pair
from localkv.cache.layout import mean_bits
from localkv.config import SUGGESTED_PAIRS, CacheConfig
from localkv.errors import byte_size
from localkv.memory.fit import fitting_pairs, usual_pairs
from localkv.memory.plan import QUANTS, MemoryPlan, ModelMemory, bits_per_weight, requantised
from localkv.quant_formats import KV_FORMATS

if TYPE_CHECKING:
    from localkv.loader.chosen_cache import KVRisk


ROUNDING_KLD = {
    "q8_0": (0.0028, 0.0021),
    "q6_K": (0.0028, 0.0019),
    "q4_K": (0.0029, 0.0020),
    "q4_0": (0.0032, 0.0024),
}
"""What it costs to round activations to 8 bits, by the type of the weights that they meet.

A cost is the mean divergence (nats) of predictions from those with float32 products. The first is
SmolLM2 135M's, the second Gemma 3 270M's. docs/quality.md says how it was measured; a test
compares.
"""


@dataclass(frozen=True)
class RoundingCost:
    """What rounding of activations to 8 bits costs with a model's weights.

    Attributes:
        type_name: of the most weights whose products round them.
        least, most: mean divergence in nats, of the models that it was measured with; with the
            types that were measured, where this one was not.
    """

    type_name: str
    least: float
    most: float


def rounding_cost(memory: ModelMemory) -> RoundingCost | None:
    """What products cost that round activations to 8 bits; None if the model has none."""
    if not memory.rounding_types:
        return None
    ((name, _),) = memory.rounding_types.most_common(1)
    known = ROUNDING_KLD.get(name)
    found = known or tuple(one for row in ROUNDING_KLD.values() for one in row)
    return RoundingCost(name, min(found), max(found))


@dataclass(frozen=True)
class PairFit:
    """One pair of cache types and a budget.

    Attributes:
        pair: the types of K and of V.
        bits: per value, averaged over K and V.
        plan: its memory with the requested context.
        fits: all of it, mapped weights too.
        longest: tokens of the longest context that fits, in whole pages; 0 for none.
    """

    pair: Pair
    bits: float
    plan: MemoryPlan
    fits: bool
    longest: int


@dataclass(frozen=True)
class QuantFit:
    """How the model fits with weights of one type.

    Attributes:
        name: the type; for the model as it is, the type that its file has.
        is_own: it is the model as it is.
        n_bytes: of the weights.
        bits: per weight.
        longest: the longest context that fits, by pair.
    """

    name: str
    is_own: bool
    n_bytes: int
    bits: float
    longest: dict[Pair, int]


@dataclass(frozen=True)
class Recommendation:
    """A recommendation.

    Attributes:
        pair: the types of K and of V; None if nothing fits.
        n_ctx: tokens of context, fewer than asked for if these do not fit.
        reason: one line.
        quant: another type of weights that this is for; None for the model as it is.
    """

    pair: Pair | None
    n_ctx: int
    reason: str
    quant: str | None = None


def shown_pairs(memory: ModelMemory) -> list[Pair]:
    """The pairs of a table where the user names none, from the most bits to the fewest."""
    shown = fitting_pairs(SUGGESTED_PAIRS, memory.config)
    return shown if len(shown) > 1 else usual_pairs(memory.config)  # blocks don't fit the heads


def pair_fit(memory: ModelMemory, cache: CacheConfig, pair: Pair, budget: int) -> PairFit:
    """How a pair fits in `n_bytes`; `cache` gives the numbers of tokens and sequences."""
    asked = replace(cache, type_k=pair[0], type_v=pair[1])
    plan = memory.plan(asked)
    return PairFit(
        pair,
        mean_bits(pair, memory.config),
        plan,
        plan.total <= budget,
        memory.longest_context(asked, budget),
    )


def quant_fits(
    memory: ModelMemory, cache: CacheConfig, pairs: Sequence[Pair], budget: int, own: str
) -> list[QuantFit]:
    """The longest contexts with weights of the model's `own` types and of others, by bits."""

    def fit(name: str, is_own: bool, model: ModelMemory) -> QuantFit:
        longest = {
            pair: model.longest_context(replace(cache, type_k=pair[0], type_v=pair[1]), budget)
            for pair in pairs
        }
        bits = bits_per_weight(model.tensors)
        return QuantFit(name, is_own, sum(model.weights), bits, longest)

    rows = [fit(own, True, memory)]
    for name in QUANTS:
        if name.lower() != own.lower():
            other = replace(memory, tensors=requantised(memory.tensors, name))
            rows.append(fit(name, False, other))
    return sorted(rows, key=lambda row: -row.bits)


def recommend(
    memory: ModelMemory,
    cache: CacheConfig,
    pairs: Sequence[Pair],
    budget: int,
    risks: Sequence[KVRisk] = (),
) -> Recommendation:
    """The pair with the most bits that holds the context, else the longest context there is.

    Pairs that the model is known to suffer from are taken only if all are such.

    Args:
        pairs: those to choose from.
        budget: bytes.
    """
    safe = [pair for pair in pairs if not any(risk.concerns(*pair) for risk in risks)] or [*pairs]
    safe.sort(key=lambda pair: (-mean_bits(pair, memory.config), -_k_bits(pair)))
    fits = [pair_fit(memory, cache, pair, budget) for pair in safe]
    tokens = f"{cache.n_ctx} tokens"
    if cache.n_sequences > 1:
        tokens = f"{cache.n_sequences} times {tokens}"
    for i, fit in enumerate(fits):
        if not fit.fits:
            continue
        left = byte_size(budget - fit.plan.total)
        if i == 0:
            reason = f"{tokens} fit in {_name(fit.pair)}, the most bits of these, with {left} left"
        else:
            over = byte_size(fits[i - 1].plan.total - budget)
            reason = (
                f"the most bits that hold {tokens}: {_name(fits[i - 1].pair)} takes {over} too "
                f"much, {_name(fit.pair)} leaves {left}"
            )
        return Recommendation(fit.pair, cache.n_ctx, reason)
    best = max(fits, key=lambda fit: fit.longest)
    smaller = _smaller_weights(memory, cache, safe, budget)
    if best.longest:
        over = byte_size(best.plan.total - budget)
        reason = f"{tokens} fit in none: {_name(best.pair)}, the smallest, takes {over} too much"
        if smaller is not None:
            reason += f", unless weights are {smaller[0].upper()} ({_name(smaller[1])})"
        return Recommendation(best.pair, best.longest, reason)
    reason = f"weights and scratch alone take more than {byte_size(budget)}"
    if smaller is not None:
        name, pair = smaller
        reason += f"; with {name.upper()} weights {tokens} fit in {_name(pair)}"
        return Recommendation(pair, cache.n_ctx, reason, quant=name)
    return Recommendation(None, 0, f"{reason}; take a smaller file, or a smaller model")


def _smaller_weights(
    memory: ModelMemory, cache: CacheConfig, pairs: Sequence[Pair], budget: int
) -> tuple[str, Pair] | None:
    """The type of weights with the most bits, and the first of `pairs`, that hold the context."""
    own = bits_per_weight(memory.tensors)
    for name in QUANTS:
        other = replace(memory, tensors=requantised(memory.tensors, name))
        if bits_per_weight(other.tensors) < own:
            for pair in pairs:
                if pair_fit(other, cache, pair, budget).fits:
                    return name, pair
    return None


def _k_bits(pair: Pair) -> float:
    return 8 * KV_FORMATS[pair[0]].block_bytes / KV_FORMATS[pair[0]].block_size


def _name(pair: Pair) -> str:
    return "/".join(pair)
