"""Running a model before a user waits for what its first batches take besides."""

from __future__ import annotations

from localkv.engine.slot.cache_slot import CacheSlot
from localkv.engine.slot.decode_loop import DecodeLoop
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
