"""How full the context is, and the memory of the KV cache, for the cache meter. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localkv.cache.layout import cache_bytes, group_layouts, with_one_pair
from localkv.chat.engine import EngineFacts
from localkv.config import SUGGESTED_PAIRS, CacheConfig
from localkv.quant_formats import KV_FORMATS


@dataclass(frozen=True)
class CacheFigures:
    """Bytes that the KV cache of a whole context takes.

    Attributes:
        type_k, type_v: names of the types.
        n_ctx: tokens of context.
        bytes_k, bytes_v: of K and of V, as allocated.
        f16_bytes: the bytes that K and V would take as f16.
        windows: of each group of layers that keeps less than the context: how many they are, of how
            many, and tokens kept.
    """

    type_k: str
    type_v: str
    n_ctx: int
    bytes_k: int
    bytes_v: int
    f16_bytes: int
    windows: tuple[tuple[int, int, int], ...] = ()

    @property
    def n_bytes(self) -> int:
        return self.bytes_k + self.bytes_v

    @property
    def is_f16(self) -> bool:
        """Whether there is nothing to compare with f16."""
        return self.type_k == self.type_v == "f16" and self.n_bytes == self.f16_bytes

    @property
    def share_of_f16(self) -> float:
        """This cache's bytes in relation to an f16 one's."""
        return self.n_bytes / self.f16_bytes


def cache_figures(
    facts: EngineFacts,
    *,
    type_k: str | None = None,
    type_v: str | None = None,
    n_ctx: int | None = None,
) -> CacheFigures:
    """The figures of a model's cache, or of one with other types or another context.

    Both types are given, or none.
    """
    cache = CacheConfig(
        facts.type_k,
        facts.type_v,
        n_ctx=n_ctx or facts.n_ctx,
        kv_rotation=facts.kv_rotation,
        type_k_swa=facts.type_k_swa,
        type_v_swa=facts.type_v_swa,
        swa_full=facts.swa_full,
        type_k_rope=facts.type_k_rope,
        layer_types=facts.layer_types,
        kv_tail=facts.kv_tail,
        kv_sink=facts.kv_sink,
        **({} if type_k else ladder_settings(facts)),
    )
    if type_k and type_v:
        cache = with_one_pair(cache, type_k, type_v)
    as_f16 = CacheConfig("f16", "f16", swa_full=facts.swa_full)
    bytes_k, bytes_v, f16_k, f16_v = (
        n_bytes
        for config in (cache, as_f16)
        for n_bytes in cache_bytes(
            group_layouts(config, facts.groups), n_ctx=cache.n_ctx, n_batch=facts.n_batch
        )
    )
    windows = tuple(
        (len(layout.group.layers), sum(facts.layers), n_rows)
        for layout in group_layouts(cache, facts.groups)
        if (n_rows := layout.n_rows(cache.n_ctx, facts.n_batch)) < cache.n_ctx
    )
    f16 = f16_k + f16_v
    return CacheFigures(*cache.shown_types, cache.n_ctx, bytes_k, bytes_v, f16, windows)


def ladder_settings(facts: EngineFacts) -> dict[str, Any]:
    """The fields of `CacheConfig` of a cache with a budget; none of another one."""
    if facts.kv_budget is None:
        return {}
    ladder = tuple((k, v) for k, _, v in (pair.partition("/") for pair in facts.kv_ladder))
    return {"kv_budget": facts.kv_budget, "kv_ladder": ladder}


def larger_cache(facts: EngineFacts, n_tokens: int = 0) -> CacheFigures | None:
    """A cache with a larger context: in the present types or smaller ones, in as many bytes if any.

    The context is doubled until a quarter of it is free, up to the length the model was trained
    for. The result is None if the context gets no longer by that, or not as long as the
    conversation, or the model is a server's. From the pairs of types that need no more bytes than
    now it takes the most exact one, or else the smallest.

    Args:
        facts: of the engine.
        n_tokens: of the conversation that it is to hold.
    """
    if facts.server or facts.kv_budget is not None:
        return None
    n_ctx = 2 * facts.n_ctx
    while 3 * n_ctx // 4 < n_tokens:
        n_ctx *= 2
    n_ctx = min(n_ctx, facts.n_ctx_train)
    if n_ctx <= max(facts.n_ctx, n_tokens):
        return None
    now = cache_figures(facts)
    offers = [
        cache_figures(facts, type_k=k, type_v=v, n_ctx=n_ctx)
        for k, v in SUGGESTED_PAIRS[1:]
        if _fits(facts, k, v)
    ]
    offers.insert(0, cache_figures(facts, n_ctx=n_ctx))
    within = [offer for offer in offers if offer.n_bytes <= now.n_bytes]
    return within[0] if within else min(offers, key=lambda offer: offer.n_bytes)


def _fits(facts: EngineFacts, type_k: str, type_v: str) -> bool:
    """Whether rows of all heads are a whole number of the types' blocks."""
    k, v = (KV_FORMATS[name].block_size for name in (type_k, type_v))
    return all(
        group.key_dim % k == 0 and (group.is_latent or group.value_dim % v == 0)
        for group in facts.groups
    )
