"""What fits: a model and its cache in memory, a context in a cache, a cache in a budget."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from localkv.arch.placement import HOST, Offload, Placement
from localkv.cache.cache_checks import check_context, keeps_latents
from localkv.cache.ladder import Pair, ladder_pairs
from localkv.cache.layout import (
    PAGE_TOKENS,
    cache_bytes,
    fits_head,
    group_layouts,
    ladder_layout,
    pages_for,
    with_one_pair,
)
from localkv.config import USUAL_PAIRS, CacheConfig
from localkv.errors import DoesNotFitError, UsageError, byte_size
from localkv.memory.plan import ModelMemory, backend_of
from localkv.system.machine_memory import Budget, machine_memory

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.kernels.backend import Backend
    from localkv.memory.plan import MemoryPlan

RESERVE = 8
"""`auto` divides the free memory by this, and leaves one such part to others."""


@dataclass(frozen=True)
class Budgeted:
    """`kv_budget` and `kv_ladder`.

    Attributes:
        budget: bytes, "auto", or None for a cache without one.
        ladder: pairs of types; empty without a budget.
        is_default: nobody chose the ladder.
    """

    budget: int | Literal["auto"] | None
    ladder: tuple[Pair, ...]
    is_default: bool = False

    @classmethod
    def of(
        cls, budget: int | Literal["auto"] | None, ladder: str | Sequence[Pair] | None
    ) -> Budgeted:
        """Check and keep the arguments `kv_budget` and `kv_ladder` of `LLM`.

        Raises:
            UsageError: the ladder is not legal, there is one without a budget, or this is no size.
        """
        if budget is None:
            if ladder is not None:
                raise UsageError(
                    "kv_ladder says what pages change to within kv_budget, and there is none",
                    hint="give kv_budget, or name the types with cache_type_k and cache_type_v",
                )
            return cls(None, ())
        if budget != "auto" and (not isinstance(budget, int) or budget < 1):
            raise UsageError(f"kv_budget is {budget!r}", hint="use a number of bytes, or 'auto'")
        return cls(budget, ladder_pairs(ladder), ladder is None)

    def check(self, *, types: Sequence[Any], sizes: Sequence[Any], before_rope: bool) -> None:
        """Refuse what does not go with a budget.

        Args:
            types, sizes: other options that name types, or how large the cache is.
            before_rope: K is stored before RoPE.

        Raises:
            UsageError: names it.
        """
        if self.budget is None:
            return
        if any(one is not None for one in types):
            raise UsageError(
                "kv_budget takes the types of kv_ladder, and others are named as well",
                hint="leave out cache_type_k, cache_type_v, kv_profile and kv_bits",
            )
        if any(one is not None for one in sizes):
            raise UsageError(
                "kv_budget says how large the cache is, and n_cache_tokens or n_cache_bytes does",
                hint="leave out one of them (--cache-tokens, --cache-size)",
            )
        if before_rope:
            raise UsageError(
                "--kv-budget: pages can't change their types where K is stored before RoPE",
                hint="leave out --kv-k-before-rope",
            )

    def cache(self, cache: CacheConfig, config: ModelSpec) -> CacheConfig:
        """The cache with the ladder; its budget is to be `fitted`.

        The default ladder is without the last pair if the model's heads do not fit that.
        """
        if self.budget is None:
            return cache
        budget = 1 if self.budget == "auto" else self.budget
        fits = all(fits_head(name, config) for name in self.ladder[-1])
        ladder = self.ladder[:-1] if self.is_default and not fits else self.ladder
        (type_k, type_v), *_ = ladder
        return replace(cache, type_k=type_k, type_v=type_v, kv_budget=budget, kv_ladder=ladder)

    def fitted(
        self,
        cache: CacheConfig,
        memory: ModelMemory,
        free: Callable[[], Budget | None],
        *,
        names_context: bool,
    ) -> tuple[CacheConfig, list[str]]:
        """The cache with its bytes, and the context that it has room for; lines for the user.

        Args:
            free: the memory that there is.
            names_context: the user asks for the cache's context.

        Raises:
            UsageError: the size of the memory is not known, or a context that the user asks for
                does not fit on the ladder.
            DoesNotFitError: there is no room for a page.
        """
        if self.budget is None:
            return cache, []
        budget = self._auto(cache, memory, free()) if self.budget == "auto" else self.budget
        cache = self._with_windows(replace(cache, kv_budget=budget), memory)
        if cache.kv_window_bytes >= budget:
            raise DoesNotFitError(
                f"--kv-budget {byte_size(budget)} is no more than layers with a window take, "
                f"{byte_size(cache.kv_window_bytes)}",
                hint="use a larger budget, a shorter context (-c), or leave out --swa-full"
                if cache.swa_full
                else "use a larger budget, a smaller batch (-ub) or smaller types (-ctk-swa, "
                "-ctv-swa)",
            )
        layout = ladder_layout(group_layouts(cache, memory.config.groups))
        sizes = layout.ladder(cache.n_ctx, cache.n_sequences)
        room, types = sizes.room(memory.n_batch) * PAGE_TOKENS, "/".join(cache.kv_ladder[-1])
        if not room and sizes.n_pages:
            raise DoesNotFitError(
                f"--kv-budget {byte_size(budget)} has no room for the pages of {PAGE_TOKENS} "
                "tokens that a tail and a sink keep in f16",
                hint="use a larger budget, or leave out --kv-tail and --kv-sink",
            )
        if not room:
            page = len(layout.group.layers) * sizes.unit * sizes.units[-1]
            raise DoesNotFitError(
                f"--kv-budget {byte_size(budget)} has no room for a page of {PAGE_TOKENS} tokens, "
                f"{byte_size(page)} in {types}"
            )
        if room >= cache.n_ctx:
            return cache, []
        fits = f"--kv-budget {byte_size(budget)} holds {room} tokens in {types}, the last types"
        if names_context:
            raise UsageError(
                f"{fits} of its ladder, not {cache.n_ctx}",
                hint=f"use -c {room}, a larger budget or smaller types (--kv-ladder)",
            )
        line = f"{fits} of its ladder: the context is {room} tokens, not {cache.n_ctx}"
        return self._with_windows(replace(cache, n_ctx=room), memory), [line]

    @staticmethod
    def _with_windows(cache: CacheConfig, memory: ModelMemory) -> CacheConfig:
        """The cache with the bytes of its layers with a window."""
        layouts = group_layouts(cache, memory.config.groups)
        of_k, of_v = cache_bytes(
            [layout for layout in layouts if layout.budget is None],
            n_ctx=cache.n_ctx,
            n_batch=memory.n_batch,
            n_sequences=cache.n_sequences,
        )
        return replace(cache, kv_window_bytes=of_k + of_v)

    @staticmethod
    def _auto(cache: CacheConfig, memory: ModelMemory, free: Budget | None) -> int:
        if free is None:
            raise UsageError(
                "--kv-budget auto: this system doesn't tell how much memory is free",
                hint="give it: --kv-budget 2GiB",
            )
        plan = memory.plan(cache)
        others = plan.resident - plan.cache_k - plan.cache_v
        return max(1, free.n_bytes - free.n_bytes // RESERVE - others)


WITHOUT_BLOCKS: Pair = ("fp8_e4m3_token", "fp8_e4m3_token")
"""The packed pair for heads that are no multiple of a block."""


def usual_pairs(config: ModelSpec) -> list[Pair]:
    """The usual pairs that a model's heads can be kept in, from the most bits to the fewest."""
    fitting = fitting_pairs(USUAL_PAIRS, config)
    return fitting if len(fitting) > 1 else [*fitting, WITHOUT_BLOCKS]


def fitting_pairs(pairs: Iterable[Pair], config: ModelSpec) -> list[Pair]:
    """The pairs of types that a model's heads can be stored in.

    Latents get one pair for each type of K, since V is a view of them.
    """
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
    """The cache with one pair of types for all layers."""
    return replace(with_one_pair(cache, *pair), kv_scales=None)


USUAL_CONTEXTS = 4
"""Contexts that many requests share, unless somebody says otherwise."""


def cache_in_bytes(
    memory: ModelMemory, cache: CacheConfig, n_bytes: int
) -> tuple[CacheConfig, list[str]]:
    """The cache with as many tokens as fit into `n_bytes` of K and V; lines for the user.

    Raises:
        UsageError: there is no room for a page.
    """
    n_tokens, lines = tokens_in_bytes(memory, cache, n_bytes), []
    if n_tokens == cache.n_sequences * cache.n_ctx:
        lines.append(
            f"the cache takes no more than {n_tokens:,} tokens need, {cache.n_sequences} contexts"
        )
    return replace(cache, n_tokens=n_tokens), lines


def cache_that_fits(
    memory: ModelMemory,
    cache: CacheConfig,
    budget: Budget | None,
    budgets: Mapping[str, Budget] | None = None,
) -> tuple[CacheConfig, list[str]]:
    """The cache with as many tokens of several texts as there is room for (`tokens_that_fit`);
    lines for the user.

    Args:
        budget: free memory, if it is known.
        budgets: free memory by device, of a model in several places.

    Raises:
        DoesNotFitError: there is no room for one context.
    """
    if memory.parts and budgets is not None:
        check_parts_fit(memory, replace(cache, n_sequences=1), budgets)
    elif budget is not None:
        check_fit(memory, replace(cache, n_sequences=1), budget)
    n_tokens, n_ctx, lines = tokens_that_fit(memory, cache, budget, budgets), cache.n_ctx, []
    if n_tokens < min(USUAL_CONTEXTS, cache.n_sequences) * n_ctx:
        lines.append(
            f"free memory has room for {n_tokens:,} tokens of all texts together, "
            f"{n_tokens / n_ctx:.1f} contexts; fewer bits of K and V make room for more"
        )
    return replace(cache, n_tokens=n_tokens), lines


def tokens_in_bytes(memory: ModelMemory, cache: CacheConfig, n_bytes: int) -> int:
    """The most tokens, in whole pages, whose K and V take at most `n_bytes`; never more than all
    sequences can have.

    Raises:
        UsageError: not even a page does.
    """
    least = _bytes(memory, cache, PAGE_TOKENS)
    if least > n_bytes:
        raise UsageError(
            f"K and V of {PAGE_TOKENS} tokens take {byte_size(least)}, more than a cache of "
            f"{byte_size(n_bytes)}",
            hint="give the cache more, or use smaller types of K and V",
        )
    whole = cache.n_sequences * cache.n_ctx
    if _bytes(memory, cache, whole) <= n_bytes:
        return whole
    return _most(lambda n: _bytes(memory, cache, n) <= n_bytes, pages_for(whole))


def tokens_that_fit(
    memory: ModelMemory,
    cache: CacheConfig,
    budget: Budget | None,
    budgets: Mapping[str, Budget] | None = None,
) -> int:
    """Tokens of some contexts (`USUAL_CONTEXTS`), or as many as memory has room for, if that is
    less; always one context's.

    Args:
        budget: free memory, if it is known.
        budgets: free memory by device, of a model in several places.
    """
    wanted = min(USUAL_CONTEXTS, cache.n_sequences) * cache.n_ctx
    if budget is None:
        return wanted

    def fits(n_tokens: int) -> bool:
        if memory.parts:
            return not _too_large(
                memory, replace(cache, n_tokens=n_tokens), budgets or {}, memory.parts
            )
        return memory.plan(replace(cache, n_tokens=n_tokens)).resident <= budget.n_bytes

    if fits(wanted):
        return wanted
    return max(cache.n_ctx, _most(fits, wanted // PAGE_TOKENS))


def _bytes(memory: ModelMemory, cache: CacheConfig, n_tokens: int) -> int:
    plan = memory.plan(replace(cache, n_tokens=n_tokens))
    return plan.cache_k + plan.cache_v


def _most(fits: Callable[[int], bool], most_pages: int) -> int:
    """The largest number of tokens, in whole pages, that fits; 0 for none."""
    most = 1
    while most < most_pages and fits(most * PAGE_TOKENS):
        most *= 2
    pages = range(1, min(most, most_pages) + 1)
    return PAGE_TOKENS * bisect_left(pages, True, key=lambda n: not fits(n * PAGE_TOKENS))


def free_on(gpus: Sequence[str], backend: Backend) -> dict[str, Budget]:
    """What is free on the devices that a model may be divided over, where that is known.

    Args:
        gpus: their names; `backend` is of the first.
    """
    from localkv.kernels.select import select_backend

    found = {HOST: machine_memory()}
    for gpu in gpus:
        own = backend if gpu == gpus[0] else select_backend(gpu)
        if own.memory is not None:
            found[gpu] = free_memory(own)
    return {device: budget for device, budget in found.items() if budget is not None}


def in_places(
    memory: ModelMemory,
    cache: CacheConfig,
    offload: Offload,
    gpus: Sequence[str],
    budgets: Mapping[str, Budget],
) -> tuple[ModelMemory, list[str]]:
    """A model in its places: where it is asked for, or as much on GPUs as fits; lines for the user.

    Raises:
        UsageError: `Offload.placed` says why.
        DoesNotFitError: see `placement_that_fits`.
    """
    shapes = {tensor.name: tensor.shape for tensor in memory.tensors}
    if offload.is_auto and all(gpu in budgets for gpu in gpus) and memory.draft is None:
        placement, lines = placement_that_fits(memory, cache, gpus, budgets, offload.split)
    else:
        placement, lines = offload.placed(memory.config, shapes, gpus), []
    backend = backend_of(placement.devices[0]) if placement.is_one else memory.backend
    return replace(memory, backend=backend, placement=placement), lines


def offloads(config: ModelSpec) -> list[Offload]:
    """Ways to place a model, from all on the GPU to nothing there: the embedding leaves first, then
    the experts of one layer after the other, and then layers."""
    n = config.n_layers
    routed = [i + 1 for i, layer in enumerate(config.layers) if layer.moe is not None]
    most = max(routed, default=0)
    return [
        Offload(),
        Offload(overrides=(("^token_embd", HOST),)),
        *(Offload(n_cpu_moe=k) for k in routed),
        *(Offload(n - k, n_cpu_moe=most) for k in range(n)),
        Offload(0),
    ]


def placement_that_fits(
    memory: ModelMemory,
    cache: CacheConfig,
    gpus: Sequence[str],
    budgets: Mapping[str, Budget],
    split: tuple[float, ...] = (),
) -> tuple[Placement, list[str]]:
    """The placement with the most on GPUs that has room there; lines for the user.

    Args:
        gpus: their names, in the order of the layers.
        budgets: free memory, by device; a device that is not there has room for all.
        split: how much each GPU gets, in proportion; by default as much as is free there.

    Raises:
        DoesNotFitError: the machine's memory has no room for the rest.
    """
    if len(gpus) > 1 and not split and all(gpu in budgets for gpu in gpus):
        split = tuple(float(budgets[gpu].n_bytes) for gpu in gpus)
    ways = [replace(way, split=split) for way in offloads(memory.config)]
    shapes = {tensor.name: tensor.shape for tensor in memory.tensors}

    def chosen(cache: CacheConfig) -> tuple[Offload, ModelMemory]:
        placed = [
            replace(memory, placement=way.placed(memory.config, shapes, gpus)) for way in ways
        ]

        def fits(i: int) -> bool:
            return not _too_large(placed[i], cache, budgets, gpus)

        i = min(bisect_left(range(len(ways)), True, key=fits), len(ways) - 1)
        return ways[i], placed[i]

    way, found = chosen(cache)
    assert found.placement is not None
    if way is ways[0]:
        return found.placement, []
    check_parts_fit(found, cache, budgets)
    free = " and ".join(byte_size(budgets[gpu].n_bytes) for gpu in gpus if gpu in budgets)
    has_gpu = any(device != HOST for device in found.placement.devices)
    where = "; ".join(found.placement.in_words(memory.config)) if has_gpu else "all is on the CPU"
    flags = f" ({way.flags})" if way.flags else ""
    lines = [f"the model is larger than the {free} free on the GPU: {where}{flags}"]
    fewer = smaller_pairs(memory, cache)
    if fewer:
        other = _uniform(cache, fewer[0])
        now, then = memory.plan(cache), memory.plan(other)
        freed = now.cache_k + now.cache_v - then.cache_k - then.cache_v
        better = chosen(other)[0]
        then_flags = better.flags or "all but the embedding there"
        if better is ways[0]:
            then_flags = "all of it there"
        lines.append(
            f"{type_flags(fewer[0])} would free {byte_size(freed)}"
            + (f", for {then_flags}" if better != way else "")
        )
    return found.placement, lines


def _too_large(
    memory: ModelMemory, cache: CacheConfig, budgets: Mapping[str, Budget], devices: Iterable[str]
) -> str:
    """The first of some devices that has no room for its part; empty if all have."""
    plan = memory.plan(cache)
    assert memory.placement is not None
    places = dict(plan.places) or {memory.placement.devices[0]: plan}
    for device in devices:
        own = places.get(device)
        if own is not None and device in budgets and own.resident > budgets[device].n_bytes:
            return device
    return ""


def check_parts_fit(memory: ModelMemory, cache: CacheConfig, budgets: Mapping[str, Budget]) -> None:
    """Refuse a placement that has no room on one of its devices.

    Raises:
        DoesNotFitError: names the device, and what would fit.
    """
    assert memory.placement is not None
    device = _too_large(memory, cache, budgets, memory.placement.devices)
    if not device:
        return
    plan = memory.plan(cache)
    own, budget = dict(plan.places).get(device, plan), budgets[device]
    remedy = "fewer layers there (-ngl), experts on the CPU (--n-cpu-moe)"
    if device == HOST:
        remedy = "more on the GPU (-ngl, --n-cpu-moe)"
    raise DoesNotFitError(
        f"{device.upper()} has {byte_size(budget.n_bytes)} {budget.source}, and its part takes "
        f"{byte_size(own.resident)}: weights {byte_size(own.weights)}, K and V "
        f"{byte_size(own.cache_k + own.cache_v)}, scratch {byte_size(own.scratch)}",
        hint=f"{remedy}, a shorter context (-c) or smaller types of K and V take less; --fit off "
        "tries it anyway",
    )


DEFAULT_N_CTX = 4096
"""Tokens of context where the user names none and the model can hold more."""


def chosen_context(n_ctx: int | None, config: ModelSpec) -> int:
    """The context that was asked for: 0 is the model's own, None at most `DEFAULT_N_CTX` of it.

    Raises:
        UsageError: there is no such context.
    """
    if n_ctx is None:
        return min(_own_context(config), DEFAULT_N_CTX)
    if n_ctx < 0:
        raise UsageError(f"a context of {n_ctx} tokens is not possible")
    check_context(n_ctx, config)
    return n_ctx or _own_context(config)


def _own_context(config: ModelSpec) -> int:
    """The context that the model was trained for, as far as it has positions."""
    return min(config.n_ctx_train, config.n_positions or config.n_ctx_train)


def beyond_training(n_ctx: int, config: ModelSpec) -> list[str]:
    """A line for the user if a context is longer than any that the model has seen."""
    trained = config.n_ctx_train
    if n_ctx <= trained:
        return []
    return [
        f"the context of {n_ctx} tokens is longer than the {trained} the model was trained for; "
        "expect poor text beyond that"
    ]


def free_memory(backend: Backend) -> Budget | None:
    """Memory that can still be allocated on a backend's device; None if the system doesn't say."""
    if backend.memory is not None:
        return Budget(backend.memory.room().free, "free on the GPU")
    return machine_memory()
