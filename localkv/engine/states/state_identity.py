"""Which model and which cache a saved state is of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from localkv.arch.spec import CacheGroup
from localkv.cache.arrays import Array
from localkv.cache.kv_cache import KVCache
from localkv.cache.layer_types import in_words
from localkv.cache.layout import SegmentSpec
from localkv.config import CacheConfig
from localkv.engine.states.state_conversion import cache_of_choices
from localkv.engine.states.state_file import StateFile
from localkv.errors import quoted

KIND, VERSION = "localkv state", "1"
UNROTATED = "none"
"""The RoPE of K that is stored as it is before RoPE."""

Groups = tuple[CacheGroup, ...]


def cache_identity(cache: KVCache) -> dict[str, str]:
    """What bytes of rows mean: segments and types by layer, scales and codebooks."""
    segments_of = {i: layout.segments for layout in cache.layouts for i in layout.group.layers}
    specs = [list(segments_of.get(i, ())) for i in range(len(cache.layers))]
    segments = [segment for layer in cache.layers for segment in layer.segments]
    return {
        "layers": json.dumps([[asdict(spec) for spec in of_layer] for of_layer in specs]),
        "types": in_words([_pair(of_layer) for of_layer in specs]),
        "scales": _digest(cache, (x for part in segments for x in (part.scale_k, part.scale_v))),
        "codebooks": _digest(
            cache, (x for part in segments for x in (part.codebook_k, part.codebook_v))
        ),
    }


def _pair(specs: list[SegmentSpec]) -> tuple[str, str] | None:
    """The types of a layer's packed rows."""
    packed = [spec for spec in specs if not spec.is_tail]
    return (packed[-1].type_k, packed[-1].type_v) if packed else None


def _digest(cache: KVCache, tables: Iterable[Array | None]) -> str:
    """Of arrays of which some may be missing; empty if all are."""
    found = [None if x is None else cache.arrays.to_numpy(x).tobytes() for x in tables]
    if not any(found):
        return ""
    return hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest()


def check_model(file: StateFile, ours: Mapping[str, str]) -> None:
    """Refuse what is no state of this version and this model.

    Raises:
        UsageError: says what differs.
    """
    theirs = file.metadata
    if theirs.get("kind") != KIND:
        raise file.refused("not a saved state")
    if theirs.get("version") != VERSION:
        version = quoted(theirs.get("version", ""))
        raise file.refused(f"version {version} is not supported, '{VERSION}' is")
    differ = {name for name, value in ours.items() if theirs.get(name) != value}
    if "model" in differ or "architecture" in differ:
        was, now = (quoted(facts.get("model_name", "")) for facts in (theirs, ours))
        if was == now:
            was, now = f"another {was}", "this one"
        raise file.refused(
            f"it is of another model: {was}, not {now}",
            hint="load it with the file that it was saved with, or a copy of it",
        )
    if "rope" in differ and UNROTATED in (theirs.get("rope"), ours["rope"]):
        was, now = ("before" if of.get("rope") == UNROTATED else "after" for of in (theirs, ours))
        raise file.refused(
            f"its keys are as they are {was} RoPE, and here they are kept as {now} it",
            hint="use --kv-k-before-rope where it was saved with it, and only there",
        )
    if "rope" in differ:
        raise file.refused(
            "its keys were rotated by other RoPE parameters",
            hint="some models choose them by the context: use the same -c as when it was saved",
        )
    if "smoothing" in differ:
        raise file.refused(
            "K and V were smoothed by another KV profile, or by none",
            hint="name the --kv-profile that it was saved with",
        )


def _differing(file: StateFile, cache: KVCache) -> dict[str, tuple[str, str]]:
    """What bytes of rows mean, where that is something else in the file: there, and here."""
    return {
        name: (file.metadata.get(name, ""), value)
        for name, value in cache_identity(cache).items()
        if file.metadata.get(name) != value
    }


def fits(file: StateFile, cache: KVCache) -> bool:
    """Whether the rows of a state are as a cache has them."""
    return not _differing(file, cache)


def cache_as_saved(file: StateFile, cache: KVCache, config: CacheConfig, groups: Groups) -> KVCache:
    """A cache of the types that the state was saved with, without memory.

    Raises:
        UsageError: there is none.
    """
    try:
        return cache_of_choices(file.metadata.get("choices", ""), config, groups, cache)
    except ValueError as error:
        raise file.refused(f"damaged: it has {error}") from error


def check_cache(file: StateFile, cache: KVCache) -> None:
    """Refuse what is no state of this cache.

    Raises:
        UsageError: says what differs.
    """
    theirs, ours = file.metadata, cache_identity(cache)
    differ = _differing(file, cache)
    if "layers" in differ:
        was, now = quoted(theirs.get("types", "")), quoted(ours["types"])
        if was == now:
            raise file.refused(
                "its rows have another rotation, tail or sink than this cache's",
                hint="use the settings of K and V that it was saved with, or convert it: "
                "LLM.load_state(path, convert=True)",
            )
        raise file.refused(
            f"its K and V are {was}, not {now}",
            hint="use the types that it was saved with, or convert it: "
            "LLM.load_state(path, convert=True)",
        )
    for name in ("scales", "codebooks"):
        if name in differ:
            raise file.refused(
                f"its rows were packed with other {name}",
                hint="name the --kv-scales or the --kv-profile that it was saved with",
            )
