"""A cache as a KV profile has it: types by layer, and scales. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from localkv.arch.spec import CacheGroup
from localkv.cache.allocated_bits import allocated_bits
from localkv.cache.layer_types import with_types
from localkv.cache.profile import DEFAULT_BITS, KVProfile, TypeList
from localkv.cache.scales import wants_scales
from localkv.config import CacheConfig, KVScales
from localkv.errors import UsageError
from localkv.formats import KV_FORMATS


@dataclass(frozen=True)
class ProfiledCache:
    """What becomes of a cache.

    Attributes:
        cache: with types by layer, if the profile's are taken.
        types: these; None if others are named.
        scales: the profile's, if a type wants them.
        warnings: for the user.
    """

    cache: CacheConfig
    types: TypeList | None = None
    scales: KVScales | None = None
    warnings: tuple[str, ...] = ()


def profiled(
    cache: CacheConfig,
    profile: KVProfile | None,
    bits: float | None,
    *,
    names_types: bool,
    groups: Sequence[CacheGroup],
    n_batch: int,
) -> ProfiledCache:
    """A cache with what a profile has for it.

    Args:
        bits: per value, that the types by layer may take in the cache's context, with their tail
            and sink (`allocated_bits`); None is `DEFAULT_BITS`.
        names_types: the cache's types were chosen, so the profile gives scales only.
        groups: the model's layers.
        n_batch: most tokens of a batch.

    Raises:
        UsageError: no types take so few bits, or `bits` says nothing.
    """
    if profile is None or names_types:
        if bits is not None:
            raise UsageError(
                "kv_bits chooses among the types of a KV profile"
                + (", but types are named" if names_types else ", and there is none"),
                hint="leave it out"
                if names_types
                else "name one: kv_profile, or --kv-profile auto",
            )
        if profile is None:
            return ProfiledCache(cache)
        with_codebooks = replace(
            cache, kv_codebooks=profile.codebooks, smoothing=profile.smoothing_name
        )
        has_codebooks = any(KV_FORMATS[name].n_centroids for name in cache.types)
        scales = profile.scales() if wants_scales(cache.types) else None
        if scales is not None or has_codebooks or profile.smoothing_name:
            warnings = _other_rotation(cache, profile) if has_codebooks else ()
            return ProfiledCache(with_codebooks, scales=scales, warnings=warnings)
        return ProfiledCache(
            cache,
            warnings=(
                "the KV profile is not used: types are named, none uses its scales or codebooks, "
                "and it has no smoothing",
            ),
        )
    types = profile.measured_with(cache.kv_tail, cache.kv_sink).within(
        DEFAULT_BITS if bits is None else bits,
        lambda one: allocated_bits(with_profile_types(cache, one), groups, n_batch),
    )
    warnings = (*_other_rotation(cache, profile), *_other_rows(cache, types))
    cache = replace(
        with_profile_types(cache, types),
        kv_codebooks=profile.codebooks,
        smoothing=profile.smoothing_name,
    )
    scales = profile.scales() if wants_scales(cache.types) else None
    return ProfiledCache(cache, types, scales, warnings)


def with_profile_types(cache: CacheConfig, types: TypeList) -> CacheConfig:
    """A cache with types by layer, and with the tail and the sink that they were measured with
    unless others are chosen."""
    tail = types.kv_tail if cache.kv_tail is None else cache.kv_tail
    sink = types.kv_sink if cache.kv_sink is None else cache.kv_sink
    return with_types(replace(cache, kv_tail=tail, kv_sink=sink), types.layers)


def _other_rows(cache: CacheConfig, types: TypeList) -> tuple[str, ...]:
    return tuple(
        f"the types by layer were measured with a {what} of {measured}, not {chosen}: expect "
        "another quality than the KV profile says"
        for what, measured, chosen in (
            ("tail", types.kv_tail, cache.kv_tail),
            ("sink", types.kv_sink, cache.kv_sink),
        )
        if None not in (measured, chosen) and measured != chosen
    )


def _other_rotation(cache: CacheConfig, profile: KVProfile) -> tuple[str, ...]:
    if cache.kv_rotation == profile.kv_rotation:
        return ()
    return (
        f"the KV profile was measured with kv_rotation {profile.kv_rotation}, not "
        f"{cache.kv_rotation}: expect another quality than it says",
    )
