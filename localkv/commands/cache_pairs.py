"""Lists of K/V cache types, as `--sweep` and `--pairs` take them. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localkv.cache.cache_checks import check_cache
from localkv.cache.ladder import Pair, unknown_type
from localkv.cache.layout import fits_head
from localkv.cache.profile import wants_scales
from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.quant_formats import KV_FORMATS

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec


def parse_pairs(text: str, option: str = "--sweep") -> list[Pair]:
    """The pairs that "K/V,K/V,..." names; every pair for "all", K as V for "pure".

    Args:
        option: the option that the text was given with.

    Raises:
        UsageError: it names none, or a type that does not exist.
    """
    if text.lower() == "all":
        return [(k, v) for k in KV_FORMATS for v in KV_FORMATS]
    if text.lower() == "pure":
        return [(name, name) for name in KV_FORMATS]
    items = [item.strip().lower() for item in text.split(",") if item.strip()]
    pairs = [_parse_pair(item, option) for item in items]
    if not pairs:
        raise UsageError(f"{option} names no pair of cache types", hint=_hint(option))
    return list(dict.fromkeys(pairs))


def _hint(option: str) -> str:
    return f"as in {option} f16/f16,bf16/f16 (K/V), or {option} pure, or {option} all"


def _parse_pair(item: str, option: str) -> Pair:
    type_k, slash, type_v = item.partition("/")
    if not slash:
        raise UsageError(f"{option}: {item!r} is not a pair of cache types", hint=_hint(option))
    for name in (type_k, type_v):
        require_cache_type(name, f"{option}: ")
    return type_k, type_v


def require_cache_type(name: str, prefix: str = "") -> None:
    """Refuse a name that is not a type.

    Raises:
        UsageError: its message begins with `prefix`, which says where the name was given.
    """
    if name not in KV_FORMATS:
        raise unknown_type(f"{prefix}unknown cache type", name)


def fitting_pairs(
    text: str, config: ModelSpec, has_scales: bool, option: str = "--sweep"
) -> list[Pair]:
    """`parse_pairs`, of "all" and "pure" only those that a model's heads can be kept in.

    Types that want scales by head are left out of these unless there are some.

    Raises:
        UsageError: a pair that was named does not fit.
    """
    pairs = parse_pairs(text, option)
    if text.lower() in ("all", "pure"):
        if not has_scales:
            pairs = [pair for pair in pairs if not wants_scales(pair)]
        return [pair for pair in pairs if all(fits_head(name, config) for name in pair)]
    for type_k, type_v in pairs:
        check_cache(CacheConfig(type_k, type_v), config.groups)
    return pairs
