"""Whether a model with its cache fits in memory, and the nearest settings that do.

Mapped weights are the system's cache of the file: they need not all fit, but where they do not they
are read from the file again for every token. So they are warned of, and the rest is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from localkv.cache.cache_checks import keeps_latents
from localkv.cache.layout import with_one_pair
from localkv.errors import DoesNotFitError, byte_size
from localkv.memory.kv_bytes import fits_head
from localkv.presets import USUAL

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.config import CacheConfig
    from localkv.memory.plan import MemoryPlan, ModelMemory
    from localkv.system.machine_memory import Budget

Pair = tuple[str, str]
"""Names of the types of K and of V."""

WITHOUT_BLOCKS: Pair = ("fp8_e4m3_token", "fp8_e4m3_token")
"""The packed pair for heads that are no multiple of a block."""


def usual_pairs(config: ModelSpec) -> list[Pair]:
    """The usual pairs that a model's heads can be kept in, from the most bits to the fewest."""
    fitting = fitting_pairs(USUAL, config)
    return fitting if len(fitting) > 1 else [*fitting, WITHOUT_BLOCKS]


def fitting_pairs(pairs: Iterable[Pair], config: ModelSpec) -> list[Pair]:
    """Those that a model's heads can be kept in; of latents, of which V is a view, one for each
    type of K."""
    if keeps_latents(config.groups):
        pairs = dict.fromkeys((k, k) for k, _ in pairs)
    return [pair for pair in pairs if all(fits_head(name, config) for name in pair)]


def type_flags(pair: Pair) -> str:
    """A pair as it is asked for: "-ctk q8_0 -ctv q4_0"."""
    return f"-ctk {pair[0]} -ctv {pair[1]}"


def check_fit(
    memory: ModelMemory, cache: CacheConfig, budget: Budget, *, has_ctx: bool = True
) -> str | None:
    """Refuse a model with a cache that can't fit.

    Args:
        has_ctx: `-c` sets the length of the context, so that the hint can name it.

    Returns:
        A warning, if it fits only without all of the mapped weights; else None.

    Raises:
        DoesNotFitError: one line with the sizes, and the nearest settings that do fit.
    """
    plan = memory.plan(cache)
    if plan.resident > budget.n_bytes:
        nearest = _nearest(memory, cache, budget, "-c {}" if has_ctx else "{} tokens")
        raise DoesNotFitError(
            f"{_asked(plan, cache)}, but {byte_size(budget.n_bytes)} is {budget.source}; {nearest}",
            hint="localkv plan shows all that fits; --fit off tries it anyway",
        )
    if plan.total > budget.n_bytes:
        left = max(0, budget.n_bytes - plan.resident)
        return (
            f"{byte_size(plan.weights_mapped)} of weights are read from the file, and only "
            f"{byte_size(left)} of memory is left to keep them in: expect it to be slow"
        )
    return None


def _asked(plan: MemoryPlan, cache: CacheConfig) -> str:
    """The request, and the memory it takes."""
    sequences = f"{cache.n_sequences} times " if cache.n_sequences > 1 else ""
    besides = "weights and scratch" if plan.weights_allocated else "scratch"  # not mapped ones
    return (
        f"K and V of {sequences}{cache.n_ctx} tokens in {'/'.join(cache.shown_types)} take "
        f"{byte_size(plan.cache_k + plan.cache_v)}, with {besides} "
        f"{byte_size(plan.resident)}"
    )


def _nearest(memory: ModelMemory, cache: CacheConfig, budget: Budget, context: str) -> str:
    """The nearest fit: a shorter context, the same in fewer bits, or shorter in the fewest."""
    fitting = []
    if n_ctx := memory.longest_context(cache, budget.n_bytes, only_resident=True):
        fitting.append(context.format(n_ctx))
    fewer = smaller_pairs(memory, cache)
    for pair in fewer:
        other = _uniform(cache, pair)
        if memory.plan(other).resident <= budget.n_bytes:
            return " or ".join([*fitting, type_flags(pair)]) + " would fit"
    if not fitting and fewer:
        other = _uniform(cache, fewer[-1])
        if n_ctx := memory.longest_context(other, budget.n_bytes, only_resident=True):
            return f"{type_flags(fewer[-1])} {context.format(n_ctx)} would fit"
    if fitting:
        return f"{fitting[0]} would fit"
    return "no context does: a smaller file of the model is needed"


def smaller_pairs(memory: ModelMemory, cache: CacheConfig) -> Sequence[Pair]:
    """The usual pairs that take fewer bytes than a cache's own, the largest first."""

    def n_bytes(cache: CacheConfig) -> int:
        plan = memory.plan(cache)
        return plan.cache_k + plan.cache_v

    own = n_bytes(cache)
    pairs = usual_pairs(memory.config)
    return [pair for pair in pairs if n_bytes(_uniform(cache, pair)) < own]


def _uniform(cache: CacheConfig, pair: Pair) -> CacheConfig:
    """The same with one pair for all layers."""
    return replace(with_one_pair(cache, *pair), kv_scales=None)
