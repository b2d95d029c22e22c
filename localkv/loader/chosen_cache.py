"""The cache that a model is given: the types and scales that were asked for, or a profile's."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localkv.cache.cache_checks import check_cache, unused_type
from localkv.cache.layout import group_layouts, pairs_of
from localkv.cache.profile import KVProfile, TypeList
from localkv.cache.profiled import profiled
from localkv.cache.scales import check_scales, read_kv_scales, require_scales
from localkv.config import CacheConfig, KVScales
from localkv.loader.found_profile import model_profile
from localkv.loader.kv_risks import kv_risks
from localkv.loader.smoothing import Smoothing

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.loader.gguf_file import GGUFFile


@dataclass(frozen=True)
class ChosenCache:
    """What a model's cache is.

    Attributes:
        cache: with types by layer, scales and codebooks where there are some.
        types: the types by layer that come from a profile; None where others are named.
        smoothing: what the weights are changed by; None if by nothing.
        warnings: one line each for the user.
    """

    cache: CacheConfig
    types: TypeList | None
    smoothing: Smoothing | None
    warnings: list[str]


def chosen_cache(
    gguf: GGUFFile,
    config: ModelSpec,
    cache: CacheConfig,
    *,
    profile: str | os.PathLike[str] | KVProfile | None = None,
    bits: float | None = None,
    scales: str | os.PathLike[str] | KVScales | None = None,
    names_types: bool = True,
    n_batch: int = 512,
) -> ChosenCache:
    """A cache with what its profile and its scales have for it, checked against the model.

    Args:
        cache: as it was asked for.
        profile: a profile, its file, or "auto".
        bits: per value, that types by layer may take; None is the usual number.
        scales: of types that are scaled by head, or their file; None takes the profile's.
        names_types: the cache's types were chosen, so the profile gives no others.
        n_batch: most tokens of a batch.

    Raises:
        UsageError: a file can't be read, or the model can't be kept in these types.
    """
    if profile is not None and not isinstance(profile, KVProfile):
        profile = model_profile(gguf, profile)
    found = profiled(
        cache,
        profile,
        bits,
        names_types=names_types,
        groups=config.groups,
        n_batch=n_batch,
    )
    smoothing = Smoothing.in_use(found.cache, profile)
    check_cache(found.cache, config.groups)
    scales = found.scales if scales is None else scales
    require_scales(found.cache.types, scales is not None)
    if scales is not None and not isinstance(scales, KVScales):
        scales = read_kv_scales(scales)
    cache = replace(found.cache, kv_scales=scales)
    group_layouts(cache, config.groups)  # refuses types that don't fit
    check_scales(cache, config)
    warnings = list(found.warnings)
    if useless := unused_type(cache, config.groups):
        warnings.append(useless)
    pairs = pairs_of(cache, config.groups)
    warnings += [
        risk.reason
        for risk in kv_risks(gguf, config)
        if any(risk.concerns(*types) for types in pairs)
    ]
    return ChosenCache(cache, found.types, smoothing, warnings)
