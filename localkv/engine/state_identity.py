"""Which model and which cache a saved state belongs to, and rows for a cache of other types.

Rows are unpacked, and packed as that cache has them, by the formats' references, so the result is
the same on every backend.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import CacheGroup
from localkv.cache.arrays import Array, Arrays, Segment
from localkv.cache.cache_checks import check_cache
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import PAGE_TOKENS, TAIL_TYPE, SegmentSpec, group_layouts, in_words
from localkv.cache.pages import PagePool
from localkv.cache.repack import hadamard
from localkv.cache.row_copies import HeldRows, PlaneRows, planes
from localkv.config import CacheConfig
from localkv.engine.state_file import StateFile
from localkv.errors import quoted
from localkv.quant_formats import FORMATS
from localkv.quant_formats.shared.codebooks import codec_of

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
    """The digest of arrays; None stands for a missing one. Empty if all are missing."""
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


def check_fits(file: StateFile, cache: KVCache) -> None:
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


Floats = NDArray[np.float32]
Read = Callable[[str], NDArray[Any]]
Key = tuple[int, int, str]
"""Layer, segment and side."""

_CHOICES = (
    "type_k",
    "type_v",
    "kv_rotation",
    "type_k_swa",
    "type_v_swa",
    "swa_full",
    "type_k_rope",
    "kv_tail",
    "kv_sink",
    "layer_types",
)


def choices_json(cache: CacheConfig) -> str:
    """What of a cache decides how its rows are packed."""
    return json.dumps({name: getattr(cache, name) for name in _CHOICES})


def cache_of_choices(
    text: str, ours: CacheConfig, groups: Seq[CacheGroup], target: KVCache
) -> KVCache:
    """A cache without memory, as another was when a state was saved.

    Args:
        text: of `choices_json`.
        ours: has the scales and codebooks.
        target: the cache of the same model now.

    Raises:
        ValueError: the text is malformed.
        UsageError: there is no such cache of this model.
    """
    try:
        data = json.loads(text)
        config = replace(
            ours,
            **{name: data[name] for name in _CHOICES[:-1]},
            layer_types=tuple(pair and (pair[0], pair[1]) for pair in data["layer_types"]),
        )
        check_cache(config, groups)
        return KVCache(
            group_layouts(config, groups),
            n_ctx=target.n_ctx,
            arrays=cast("Arrays", _Shapes()),
            kv_scales=ours.kv_scales,
            kv_codebooks=ours.kv_codebooks,
            states=target.states.specs,
        )
    except (TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError("other types than there are") from error


class _Shapes:
    """Arrays of the right shapes, without memory."""

    def bytes(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        return np.broadcast_to(np.zeros((), np.uint8), shape)

    def zeros(self, n_rows: int, n: int) -> Floats:
        return np.zeros((n_rows, n), np.float32)

    def floats(self, values: Seq[float]) -> Floats:
        return np.array(values, np.float32)

    def from_numpy(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def to_numpy(self, array: NDArray[Any]) -> NDArray[Any]:
        return array


@dataclass(frozen=True)
class _Rows:
    """Rows of one side of a layer by position: float32 [heads, tokens, channels], and which of
    them there are."""

    values: Floats
    known: NDArray[np.bool_]


class Conversion:
    """The tensors of a state for another cache.

    Args:
        source, target: caches of the same model.
        held: the rows that the state has of each pool of the source.
        read: a tensor of the state.
        n_tokens: of its text.

    Attributes:
        held: the same of each pool of the target.
    """

    def __init__(
        self, source: KVCache, target: KVCache, held: Seq[HeldRows], read: Read, n_tokens: int
    ) -> None:
        self.source, self.target = source, target
        self._source_held, self._read, self.n_tokens = held, read, n_tokens
        self._from, self._to = _by_key(source), _by_key(target)
        known = self._known()
        self.held = [
            HeldRows(pool.n_rows(n_tokens), self._gone(pool, known)) for pool in target.pools
        ]
        self._packed: tuple[Key, tuple[NDArray[np.uint8], ...]] | None = None
        self._errors, self._squares = 0.0, 0.0

    @property
    def relative_error(self) -> float:
        """Packing's errors relative to the values, both as root mean squares; 0 without values."""
        return math.sqrt(self._errors / self._squares) if self._squares else 0.0

    def _known(self) -> dict[int, NDArray[np.bool_]]:
        """The positions of each layer whose rows the state has."""
        found = dict[int, NDArray[np.bool_]]()
        for layer, segment, _ in self._from:
            known = found.setdefault(layer, np.zeros(self.n_tokens, bool))
            pool = self.source.pools[self._from[layer, segment, "k"][0].pool]
            at = _positions(pool, self._source_held[pool.index])
            known[at[at >= 0]] = True
        return found

    def _gone(self, pool: PagePool, known: dict[int, NDArray[np.bool_]]) -> tuple[int, ...]:
        """The places of a pool of the target that lack a row in any of its layers."""
        layers = {key[0] for key, found in self._to.items() if found[0].pool == pool.index}
        every = np.logical_and.reduce([known[layer] for layer in layers])
        n_rows, gone = pool.n_rows(self.n_tokens), list[int]()
        at = _positions(pool, HeldRows(n_rows))
        for place in range(-(-n_rows // PAGE_TOKENS)):
            of_page = at[place * PAGE_TOKENS : (place + 1) * PAGE_TOKENS]
            if not every[of_page[of_page >= 0]].all():
                gone.append(place)
        return tuple(gone)

    def tensor(self, plane: PlaneRows) -> NDArray[np.uint8]:
        """The rows of a plane of the target: uint8 [rows, heads, blocks, plane bytes]."""
        key = plane.layer, plane.segment, plane.side
        if self._packed is None or self._packed[0] != key:
            self._packed = key, self._pack(key)
        return self._packed[1][plane.number]

    def _pack(self, key: Key) -> tuple[NDArray[np.uint8], ...]:
        layer, number, side = key
        plane = self._to[key][0]
        rows = self._unpacked(layer, side, plane)
        pool = self.target.pools[plane.pool]
        at = _positions(pool, self.held[pool.index])
        x = np.where((at >= 0)[:, None], rows.values[:, np.maximum(at, 0)], np.float32(0))
        if not pool.spec.stores_at_once:  # groups are packed as the tail has them
            exact = FORMATS[TAIL_TYPE].codec
            x = exact.decode(exact.encode(x))
        segment = self.target.layers[layer].segments[number]
        scale, codebook, rotation = _facts(self.target, segment, side)
        codec = codec_of(plane.fmt, codebook)
        packed = codec.encode(np.ascontiguousarray(hadamard(x, rotation) / scale))
        again = hadamard(codec.decode(packed) * scale, rotation)
        self._errors += float(np.square(again - x, dtype=np.float64).sum())
        self._squares += float(np.square(x, dtype=np.float64).sum())
        return tuple(np.ascontiguousarray(part.swapaxes(0, 1)) for part in packed)

    def _unpacked(self, layer: int, side: str, like: PlaneRows) -> _Rows:
        """What the state has of a layer: rows that are stored as f16, too, are taken from there."""
        n_heads, n_blocks, _ = like.row_shape
        dim = n_blocks * like.fmt.block_size
        values = np.zeros((n_heads, self.n_tokens, dim), np.float32)
        known = np.zeros(self.n_tokens, bool)
        keys = [key for key in self._from if key[0] == layer and key[2] == side]
        for key in sorted(keys, key=lambda key: self._is_exact(key)):
            pool = self.source.pools[self._from[key][0].pool]
            at = _positions(pool, self._source_held[pool.index])
            segment = self.source.layers[layer].segments[key[1]]
            scale, codebook, rotation = _facts(self.source, segment, side)
            stored = [self._read(plane.name).swapaxes(0, 1) for plane in self._from[key]]
            codec = codec_of(self._from[key][0].fmt, codebook)
            if len(at):
                found = hadamard(codec.decode(stored) * scale, rotation)
                values[:, at[at >= 0]] = found[:, at >= 0]
                known[at[at >= 0]] = True
        return _Rows(values, known)

    def _is_exact(self, key: Key) -> bool:
        return self.source.pools[self._from[key][0].pool].tail is not None


def _by_key(cache: KVCache) -> dict[Key, list[PlaneRows]]:
    found = dict[Key, list[PlaneRows]]()
    for plane in planes(cache):
        found.setdefault((plane.layer, plane.segment, plane.side), []).append(plane)
    return found


def _positions(pool: PagePool, held: HeldRows) -> NDArray[np.int64]:
    """The positions of the rows of a pool that are there; -1 between a sink and the tail's rows."""
    at = [
        np.arange(place * PAGE_TOKENS, place * PAGE_TOKENS + end - start)
        for place, start, end in held.spans
    ]
    rows = np.concatenate(at) if at else np.zeros(0, np.int64)
    found = rows + pool.first
    if pool.tail is not None:
        found = np.where(rows < pool.tail.skipped, -1, found)
        found = np.where(rows < pool.tail.start, rows, found)
    return found


def _facts(cache: KVCache, segment: Segment, side: str) -> tuple[Any, Seq[float] | None, int]:
    """What rows of a side are divided by, [heads, 1, 1] or 1, their codebook, and rotation."""
    scale, codebook = getattr(segment, f"scale_{side}"), getattr(segment, f"codebook_{side}")
    to_numpy = cache.arrays.to_numpy
    divisor = np.float32(1) if scale is None else to_numpy(scale)[:, None, None]
    table = None if codebook is None else to_numpy(codebook).tolist()
    return divisor, table, getattr(segment, f"rotation_{side}")
