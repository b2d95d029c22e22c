"""How many tokens a cache of all requests together is given: from bytes, or from what is free."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from localkv.cache.layout import PAGE_TOKENS, pages_for
from localkv.errors import UsageError, byte_size
from localkv.memory.fit import check_fit

if TYPE_CHECKING:
    from localkv.config import CacheConfig
    from localkv.memory.plan import ModelMemory
    from localkv.system.machine_memory import Budget

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
    memory: ModelMemory, cache: CacheConfig, budget: Budget | None
) -> tuple[CacheConfig, list[str]]:
    """The cache with as many tokens of several texts as there is room for (`tokens_that_fit`);
    lines for the user.

    Args:
        budget: free memory, if it is known.

    Raises:
        DoesNotFitError: there is no room for one context.
    """
    if budget is not None:
        check_fit(memory, replace(cache, n_sequences=1), budget)
    n_tokens, n_ctx, lines = tokens_that_fit(memory, cache, budget), cache.n_ctx, []
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


def tokens_that_fit(memory: ModelMemory, cache: CacheConfig, budget: Budget | None) -> int:
    """Tokens of some contexts (`USUAL_CONTEXTS`), or as many as memory has room for, if that is
    less; always one context's.

    Args:
        budget: free memory, if it is known.
    """
    wanted = min(USUAL_CONTEXTS, cache.n_sequences) * cache.n_ctx
    if budget is None:
        return wanted

    def fits(n_tokens: int) -> bool:
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
