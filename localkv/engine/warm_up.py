"""Running a model before a user waits for what else its first batches take."""

from __future__ import annotations

import time

from localkv.engine.cache_slot import CacheSlot
from localkv.engine.recorded import DecodeLoop
from localkv.engine.speculation.pace import SIZES
from localkv.engine.speculation.prices import Prices
from localkv.model import Transformer

WARM_UP_TOKENS = 16
"""A prompt of this length uses the kernels of long prompts, unless a GPU records them."""


def compile_kernels(slot: CacheSlot) -> None:
    """Run the model on some tokens, in a turn, so that all kernels it needs are compiled.

    On a CPU these are a prompt's. The kernels of generated tokens are a matter of milliseconds
    if they were compiled before, and else are compiled while a prompt runs.

    On a GPU a product's tiles depend on the number of tokens, each size from one power of two
    to another at least; so every power of two is run. Where weights may still be in a file and
    products are compiled when these are prepared, one layer has all the rest.

    The slot holds no tokens afterwards.
    """
    n_ctx = slot.cache.n_ctx
    if slot.loop is None:
        _try(slot, slot.model.first_layers(1), min(n_ctx, slot.n_batch, WARM_UP_TOKENS))
        slot.truncate(0)
        return
    most = min(n_ctx, slot.n_batch)
    # the longest first: if there is no room for its scratch, that shows at once
    sizes = sorted({most, *(1 << i for i in range(most.bit_length()))} - {1}, reverse=True)
    if slot.model.backend.compile_together is not None:
        slot.model.backend.compile_together(lambda: _rehearse(slot, sizes))
    for n_tokens in sizes:
        _try(slot, slot.model, n_tokens)
    slot.truncate(0)
    with slot.scratch_of(1):
        slot.loop.warm_up(slot.sequence)


def finish_loading(slot: CacheSlot) -> None:
    """Do what else the first prompt would wait for, in a turn: lay out weights that loading left
    for it, and run all layers once. The slot holds no tokens afterwards."""
    if slot.model.backend.late is not None:
        slot.model.backend.late.finish()
    if slot.loop is None:  # else `compile_kernels` has run them
        for n_tokens in (min(slot.cache.n_ctx - 1, slot.n_batch, WARM_UP_TOKENS), 1):
            if n_tokens:
                slot.evaluate([0] * n_tokens, generated=n_tokens == 1)
        slot.forget()


def _rehearse(slot: CacheSlot, sizes: list[int]) -> None:
    """Make the launches of `compile_kernels` on a GPU, once for each kind of layer."""
    model = slot.model.one_of_each_layer(slot.cache)
    for n_tokens in sizes:
        _try(slot, model, n_tokens)
    slot.truncate(0)
    with slot.scratch_of(1):
        DecodeLoop(model, slot.cache, records=False).warm_up(slot.sequence)


def _try(slot: CacheSlot, model: Transformer, n_tokens: int) -> None:
    """Run `model` on some tokens at the start of the context; none of them counts.

    One token is a generated one, more are a prompt's.
    """
    slot.truncate(0)
    slot.forward(model, [0] * n_tokens, "last", generated=n_tokens == 1)


_TIMES = 4
_QUICK = 2e-3
"""Seconds of a step, beside which it matters what is made once for each size."""


def warm_up_drafts(
    slot: CacheSlot, prices: Prices, draft_max: int, *, any_size: bool = False
) -> None:
    """Run batches of each draft size some times, in a turn, and note what they cost.

    Each batch comes after a first token. The first run of a size takes long, so it is not counted.
    The cache starts empty afterwards.

    Args:
        any_size: drafts may have other sizes, too. If a step takes at most `_QUICK` seconds, run
            these as well, so that small models don't wait for them later.
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
