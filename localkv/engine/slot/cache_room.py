"""Allocating the KV cache, and the error if it has no room."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import PAGE_TOKENS, cache_bytes, group_layouts, pages_for
from localkv.cache.recurrent_state import CheckpointConfig
from localkv.config import CacheConfig
from localkv.errors import LocalKVError, byte_size
from localkv.kernels.device_memory import Room, naming_what_fails
from localkv.model import Transformer


def allocated_cache(
    model: Transformer,
    cache: CacheConfig,
    n_batch: int,
    make_cache: Callable[..., KVCache] = KVCache,
) -> KVCache:
    """The cache of a model for `cache.n_sequences` sequences, on its backend's device.

    Args:
        n_batch: most tokens of a batch.
        make_cache: takes the arguments of `KVCache`.

    Raises:
        LocalKVError: it does not fit the memory; names its size and the context that would fit.
    """
    layouts = group_layouts(cache, model.config.groups)

    def bytes_of(n_ctx: int) -> int:
        k, v = cache_bytes(
            layouts,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_sequences=cache.n_sequences,
            n_tokens=cache.n_tokens,
        )
        return k + v

    def what_fits(room: Room) -> str:
        pages = range(1, pages_for(cache.n_ctx) + 1)
        fit = PAGE_TOKENS * bisect_right(pages, room.free, key=lambda n: bytes_of(n * PAGE_TOKENS))
        if fit == 0:
            return "the weights leave no room: use a smaller model, or --device cpu"
        return f"{fit} tokens (-c) would fit, or more in smaller types of K and V (-ctk, -ctv)"

    times = f"{cache.n_sequences} times " if cache.n_sequences > 1 else ""
    what = f"a KV cache of {byte_size(bytes_of(cache.n_ctx))} for {times}{cache.n_ctx} tokens"
    try:
        with naming_what_fails(what, model.backend.memory, what_fits):
            return make_cache(
                layouts,
                n_ctx=cache.n_ctx,
                n_batch=n_batch,
                n_sequences=cache.n_sequences,
                n_tokens=cache.n_tokens,
                arrays=model.backend.arrays,
                kv_scales=cache.kv_scales,
                kv_codebooks=cache.kv_codebooks,
                states=model.config.states,
                checkpoints=CheckpointConfig(cache.ctx_checkpoints, cache.checkpoint_min_step),
            )
    except (RuntimeError, MemoryError) as error:
        raise LocalKVError(
            f"{what} does not fit the memory", hint="use a smaller context (-c)"
        ) from error
