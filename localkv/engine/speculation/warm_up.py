"""Running batches of the sizes that drafts have, before a user waits for them."""

from __future__ import annotations

import time

from localkv.engine.slot.cache_slot import CacheSlot
from localkv.engine.speculation.pace import SIZES
from localkv.engine.speculation.prices import Prices

_TIMES = 4
_QUICK = 2e-3
"""Seconds of a step, beside which it matters what is made once for each size."""


def warm_up_drafts(
    slot: CacheSlot, prices: Prices, draft_max: int, *, any_size: bool = False
) -> None:
    """Run each size some times, in a turn, and note what it costs, behind a first token; the first
    time takes long.

    The cache starts empty afterwards.

    Args:
        any_size: there are drafts of other sizes, too, which small models don't wait for later.
    """
    most = min(slot.cache.n_ctx, slot.n_batch)
    sizes = [1 + size for size in SIZES if size <= draft_max]
    if any_size:
        sizes += sorted(set(range(2, 2 + draft_max)) - {*sizes})
    for _ in range(2):  # the second lays out what the first could do without
        slot.truncate(0)
        slot.evaluate([0])

    def took(n_tokens: int) -> float:
        slot.truncate(1)
        started = time.perf_counter()
        logits = slot.evaluate([0] * n_tokens, "all", generated=True)
        slot.model.backend.arrays.to_numpy(logits)  # a GPU has only been told so far
        return time.perf_counter() - started

    for n_tokens in sizes:
        if n_tokens - 1 not in SIZES and prices.one > _QUICK:
            continue
        slot.truncate(0)
        slot.evaluate([0])
        if n_tokens < most:
            took(n_tokens)  # the first time takes long
            pairs = [(took(1), took(n_tokens)) for _ in range(_TIMES)]
            one, several = (min(seconds) for seconds in zip(*pairs, strict=True))
            prices.compared(n_tokens, several, one)
    slot.truncate(0)
