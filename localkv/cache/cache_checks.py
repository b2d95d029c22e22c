"""Whether a model can have a cache as the user wants it. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from localkv.arch.spec import AttentionSpec, CacheGroup, ModelSpec
from localkv.cache.ladder import unknown_type
from localkv.cache.layout import TAIL_TYPE, GroupLayout, check_tail, typed_groups, types_in
from localkv.config import CacheConfig
from localkv.errors import UsageError, counted
from localkv.quant_formats import FORMATS, KV_FORMATS


def check_cache(cache: CacheConfig, groups: Sequence[CacheGroup]) -> None:
    """Refuse cache types that do not exist or can't hold a head's row, and settings of windows for
    a model without any.

    Raises:
        UsageError: names the types that work.
    """
    check_layer_types(cache, groups)
    check_budget(cache, groups)
    pairs = [(group, types_in(cache, group)) for group in typed_groups(cache, groups)]
    for group, (type_k, type_v) in pairs:
        k, v = ("latent", "rotated key") if group.is_latent else ("K", "V")
        _check_cache_type(k, type_k, group.key_dim)
        _check_cache_type(v, type_v, group.value_dim)
    check_windows(cache, groups)
    check_latents(cache, groups)
    if cache.kv_budget is None:
        check_tail(cache, pairs)


def check_context(n_ctx: int, config: ModelSpec) -> None:
    """Refuse a context with more tokens than the model has positions.

    Raises:
        UsageError: it is one.
    """
    if 0 < config.n_positions < n_ctx:
        raise UsageError(
            f"a context of {n_ctx} tokens is not possible: the model has "
            f"{counted(config.n_positions, 'position')}"
        )


def check_alibi(layouts: Sequence[GroupLayout], config: ModelSpec) -> None:
    """Refuse caches of several segments where attention is biased by distance.

    Raises:
        UsageError: it is one.
    """
    biased = any(
        isinstance(layer.mixer, AttentionSpec) and layer.mixer.params.alibi
        for layer in config.kinds
    )
    if biased and any(len(layout.segments) > 1 for layout in layouts):
        raise UsageError(
            f"attention of {config.architecture} models is biased by distance (ALiBi), which works "
            "without tails, sinks and budgets only",
            hint="leave out --kv-tail, --kv-sink and --kv-budget, and take types that pack tokens "
            "one by one, such as q8_0",
        )


def check_exact_rows(caches: Sequence[CacheConfig], groups: Sequence[CacheGroup]) -> None:
    """Refuse a tail or a sink that would not work in any of several caches.

    Raises:
        UsageError: names the setting.
    """
    found: UsageError | None = None
    for cache in caches:
        pairs = [(group, types_in(cache, group)) for group in typed_groups(cache, groups)]
        try:
            check_tail(cache, pairs)
            return
        except UsageError as error:
            found = error
    if found is not None:
        raise found


def check_budget(cache: CacheConfig, groups: Sequence[CacheGroup]) -> None:
    """Refuse a budget where pages can't change their types.

    Raises:
        UsageError: names what stands in the way.
    """
    if cache.kv_budget is None:
        return
    full = [group for group in groups if not group.reach]
    reasons = [
        (cache.layer_types, "types by layer"),
        (any(group.is_latent for group in groups), "latents"),
        (not full, "nothing but layers with a window"),
        (len(full) > 1, "layers whose rows differ in size"),
    ]
    for found, what in reasons:
        if found:
            raise UsageError(
                f"--kv-budget: pages can't change their types in a cache with {what}",
                hint="leave it out, and choose types that fit (-ctk, -ctv)",
            )
    first = cache.kv_ladder[0]
    for flag, value in (("--kv-tail", cache.kv_tail), ("--kv-sink", cache.kv_sink)):
        if value and first != (TAIL_TYPE, TAIL_TYPE):
            raise UsageError(
                f"{flag} {value} keeps rows in {TAIL_TYPE}, and the ladder begins with "
                f"{'/'.join(first)}",
                hint=f"leave it out, or begin --kv-ladder with {TAIL_TYPE}",
            )
    for pair in cache.kv_ladder:
        for side, name, dim in zip("KV", pair, (full[0].key_dim, full[0].value_dim), strict=True):
            _check_cache_type(side, name, dim)


def check_layer_types(cache: CacheConfig, groups: Sequence[CacheGroup]) -> None:
    """Refuse types by layer that are for other layers than the model's.

    Raises:
        UsageError: names a layer.
    """
    if not cache.layer_types:
        return
    given = {layer for layer, pair in enumerate(cache.layer_types) if pair is not None}
    wanted = {layer for group in groups for layer in group.layers}
    if given != wanted:
        layer = min(given ^ wanted)
        has = "keeps K and V" if layer in wanted else "keeps no K and V of its own"
        raise UsageError(
            f"the types by layer are of another model: layer {layer} of this one {has}",
            hint="measure the model itself: localkv calibrate -m MODEL",
        )


def check_before_rope(profile: object, scales: object) -> None:
    """Refuse what was measured of K as it is after RoPE, for a cache that has it before.

    Args:
        profile, scales: a KV profile and scales of heads, or None.

    Raises:
        UsageError: there is one.
    """
    for option, given in (("kv_profile", profile), ("kv_scales", scales)):
        if given is not None:
            raise UsageError(
                f"{option}: measured of K as it is after RoPE, and k_before_rope keeps it before",
                hint="leave out one of the two",
            )


def check_windows(cache: CacheConfig, groups: Iterable[CacheGroup]) -> None:
    """Refuse settings of windows for a model whose layers have none.

    Raises:
        UsageError: names the setting.
    """
    if any(group.reach for group in groups):
        return
    for flag, value in (
        ("-ctk-swa", cache.type_k_swa),
        ("-ctv-swa", cache.type_v_swa),
        ("--swa-full", cache.swa_full),
    ):
        if value:
            raise UsageError(
                f"{flag} is about layers with a window, and this model has none",
                hint="leave it out: all of its layers see the whole context",
            )


def check_latents(cache: CacheConfig, groups: Iterable[CacheGroup]) -> None:
    """Refuse settings of latents for a model without any.

    Raises:
        UsageError: names the setting.
    """
    default = CacheConfig.type_k_rope
    if cache.type_k_rope != default and not any(group.is_latent for group in groups):
        raise UsageError(
            f"-ctk-rope {cache.type_k_rope} is about keys that are stored as a latent and a "
            "rotated part, and this model has none",
            hint="leave it out: -ctk is the type of whole keys",
        )


def keeps_latents(groups: Iterable[CacheGroup]) -> bool:
    """Whether all rows of a model are latents and rotated parts of keys."""
    kinds = {group.is_latent for group in groups}
    return kinds == {True}


def unused_type(cache: CacheConfig, groups: Iterable[CacheGroup]) -> str | None:
    """What to tell those who chose a type of V that a model has no use for; None elsewhere."""
    if cache.type_v in (cache.type_k, CacheConfig.type_v):
        return None
    if not keeps_latents(groups):
        return None
    return (
        f"V is a view of K's latents in this model, so -ctv {cache.type_v} has no effect: latents "
        f"are {cache.type_k} (-ctk), the rotated parts of keys {cache.type_k_rope} (-ctk-rope)"
    )


def _check_cache_type(side: str, name: str, head_dim: int) -> None:
    fits = [fmt.name for fmt in KV_FORMATS.values() if head_dim % fmt.block_size == 0]
    if name not in KV_FORMATS:
        raise unknown_type(f"unknown {side} cache type", name)
    if name not in fits:
        raise UsageError(
            f"{side} cache type {name} with block size {FORMATS[name].block_size} does not "
            f"divide head_dim {head_dim}",
            hint=f"use {', '.join(fits)}",
        )
