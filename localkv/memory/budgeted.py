"""A cache whose bytes the user names: what options go with it, and how long it is."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Literal

from localkv.cache.ladder import Pair, ladder_pairs
from localkv.cache.layout import PAGE_TOKENS, cache_bytes, group_layouts, ladder_layout
from localkv.config import CacheConfig
from localkv.errors import DoesNotFitError, UsageError, byte_size
from localkv.memory.plan import ModelMemory
from localkv.system.machine_memory import Budget

RESERVE = 8
"""`auto` divides the free memory by this, and leaves one such part to others."""


@dataclass(frozen=True)
class Budgeted:
    """`kv_budget` and `kv_ladder`.

    Attributes:
        budget: bytes, "auto", or None for a cache without one.
        ladder: pairs of types; empty without a budget.
    """

    budget: int | Literal["auto"] | None
    ladder: tuple[Pair, ...]

    @classmethod
    def of(cls, budget: int | Literal["auto"] | None, ladder: str | Seq[Pair] | None) -> Budgeted:
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
        return cls(budget, ladder_pairs(ladder))

    def check(self, *, types: Seq[Any], sizes: Seq[Any], before_rope: bool) -> None:
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
                "kv_budget takes the types of kv_ladder, and others are named besides",
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

    def cache(self, cache: CacheConfig) -> CacheConfig:
        """The cache with the ladder; its budget is to be `fitted`."""
        if self.budget is None:
            return cache
        budget = 1 if self.budget == "auto" else self.budget
        (type_k, type_v), *_ = self.ladder
        return replace(cache, type_k=type_k, type_v=type_v, kv_budget=budget, kv_ladder=self.ladder)

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
        room, types = sizes.room(memory.n_batch) * PAGE_TOKENS, "/".join(self.ladder[-1])
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
                f"{byte_size(page)} in {types}",
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
