"""A text's rows in a file, and back: the file, which cache it fits, what makes a state.

A state holds tokens, each with its kind, and all rows that the cache has of them. Rows have the
order of the formats' references. So a cache of another backend takes a state, too, and one for a
longer context. Once loaded, a state is one of the texts that are kept (`PrefixCache`). Prompts go
on with what they have in common with it, and with the bits that they would have if it had been
evaluated here.

`state_file.py` has the format. The file is written to a name of its own that becomes the wanted one
at the end.

Rows for a cache of other types are unpacked, and packed as that cache has them, by the formats'
references, so the result is the same on every backend.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import CacheGroup
from localkv.cache.arrays import Arrays, Segment
from localkv.cache.cache_checks import check_cache
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import PAGE_TOKENS, TAIL_TYPE, group_layouts, pages_for
from localkv.cache.pages import Checkpoint, PagePool
from localkv.cache.pages import Sequence as CachedSequence
from localkv.cache.repack import hadamard
from localkv.cache.row_copies import (
    HeldRows,
    PlaneRows,
    checkpoints_in,
    conv_out,
    held_rows,
    memory_out,
    n_held,
    planes,
    rows_in,
    rows_out,
    take_pages,
)
from localkv.config import CacheConfig
from localkv.engine.cache_slot import CacheSlot
from localkv.engine.prefix import GENERATED, KeptText, marked, n_common, unmarked
from localkv.engine.state_file import (
    IDS,
    KINDS,
    StateFile,
    StateTensor,
    adapters_of,
    cache_identity,
    in_parts,
    write_state,
)
from localkv.errors import UsageError, quoted
from localkv.quant_formats import FORMATS
from localkv.quant_formats.shared.codebooks import codec_of

KIND, VERSION = "localkv state", "1"

UNROTATED = "none"
"""The RoPE of K that is stored as it is before RoPE."""

Groups = tuple[CacheGroup, ...]


def check_adapters(file: StateFile, cache: KVCache) -> None:
    """Refuse a state whose rows were made with other adapters than texts have here.

    Raises:
        UsageError: they were.
    """
    if file.metadata.get("adapters", "") != adapters_of(cache, cache.scales):
        raise file.refused(
            "it was made with other LoRA adapters, or other scales of them",
            hint="load it with the --lora options that it was saved with",
        )


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
            hint="use the options for RoPE that it was saved with (--rope-scale and others), and "
            "the same -c, by which some models choose them",
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
        scale, codebook, rotation = _facts(self.target.arrays_of(layer), segment, side)
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
            scale, codebook, rotation = _facts(self.source.arrays_of(layer), segment, side)
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


def _facts(arrays: Arrays, segment: Segment, side: str) -> tuple[Any, Seq[float] | None, int]:
    """What rows of a side are divided by, [heads, 1, 1] or 1, their codebook, and rotation."""
    scale, codebook = getattr(segment, f"scale_{side}"), getattr(segment, f"codebook_{side}")
    divisor = np.float32(1) if scale is None else arrays.to_numpy(scale)[:, None, None]
    table = None if codebook is None else arrays.to_numpy(codebook).tolist()
    return divisor, table, getattr(segment, f"rotation_{side}")


def save_text(
    path: str | os.PathLike[str],
    cache: KVCache,
    sequence: CachedSequence,
    ids: NDArray[np.int64],
    identity: Mapping[str, str],
) -> int:
    """Write a text of the cache to a file; returns its bytes.

    Args:
        ids: int64 [tokens], `marked`.
        identity: of the model.

    Raises:
        UsageError: the file can't be written.
    """
    ids = ids[: sequence.length]
    kept = _states_of(cache, sequence)
    held = held_rows(cache, sequence)
    text = StateText(
        len(ids),
        min(sequence.checkpoint, len(ids)),
        tuple(rows.gone for rows in held),
        tuple(rows.exact_from for rows in held),
        tuple(item.length for item in kept),
        next((rows.rungs for rows in held if rows.rungs), ()),
    )
    metadata = {
        "kind": KIND,
        "version": VERSION,
        **identity,
        **cache_identity(cache),
        "adapters": adapters_of(cache, sequence.scales),
        "text": text.as_json(),
    }
    tensors = [
        StateTensor(IDS, "I32", (len(ids),), in_parts((ids % GENERATED).astype(np.int32))),
        StateTensor(KINDS, "U8", (len(ids),), in_parts((ids & GENERATED > 0).astype(np.uint8))),
    ]
    for plane in planes(cache):
        rows = held[plane.pool].of(plane)
        parts = partial(rows_out, cache, sequence, plane, rows)
        tensors.append(StateTensor(plane.name, "U8", (rows.n_stored, *plane.row_shape), parts))
    for name, shape, values in _state_tensors(cache, kept):
        tensors.append(StateTensor(name, "F32", shape, in_parts(values)))
    return write_state(path, metadata, tensors)


def _states_of(cache: KVCache, sequence: CachedSequence) -> list[Checkpoint]:
    """The checkpoints of a sequence, and its states as they are."""
    states, kept = cache.states, list(sequence.kept)
    is_kept = any(item.length == sequence.length for item in kept)
    if states.has_place(sequence) and sequence.n_stepped == sequence.length and not is_kept:
        kept.append(Checkpoint(sequence.length, states.copied(sequence)))
    return kept


def _state_tensors(
    cache: KVCache, kept: list[Checkpoint]
) -> Iterator[tuple[str, tuple[int, ...], NDArray[np.float32]]]:
    for i, state in cache.states.layers.items():
        rows = conv_out(state, kept)
        yield f"layers.{i}.state.rows", rows.shape, rows
        if state.memory is not None:
            memory = memory_out(cache.arrays_of(i), state, kept)
            yield f"layers.{i}.state.memory", memory.shape, memory


class LoadedState:
    """A state that was read and checked, to be put into a cache.

    Attributes:
        ids: int64 [tokens], `marked`.

    Args:
        path: a file.
        cache: that it is to be put into.
        identity: of the model.
        n_vocab: tokens that there are.
        exactly: as in `KVCache.reachable`.
        convert: the cache's settings and the model's groups of layers, if rows of other types are
            to be packed again; None refuses them.

    Raises:
        UsageError: it can't be read, is damaged, or does not fit the model or the cache.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        cache: KVCache,
        identity: Mapping[str, str],
        n_vocab: int,
        *,
        exactly: bool,
        convert: tuple[CacheConfig, Groups] | None = None,
    ) -> None:
        self.cache = cache
        self.file = file = StateFile(path)
        check_model(file, identity)
        check_adapters(file, cache)
        source = cache
        if convert is not None and not fits(file, cache):
            if cache.ladder is not None:
                raise file.refused(
                    "it has other types than this cache, whose pages change theirs (--kv-budget)",
                    hint="convert it for a cache without a budget",
                )
            source = cache_as_saved(file, cache, *convert)
        check_fits(file, source)
        try:
            self.text = read_state_text(file.metadata.get("text", ""), source)
        except ValueError as error:
            raise file.refused(f"damaged: its text has {error}") from error
        n_tokens = self.text.n_tokens
        if n_tokens > cache.n_ctx:
            raise file.refused(
                f"it has {n_tokens} tokens, but the context holds {cache.n_ctx}",
                hint=f"use a context of at least {n_tokens} (-c)",
            )
        self.held = self.text.held(source)
        file.check(self._wanted(source))
        ids = file.tensor(IDS)
        if len(ids) and not 0 <= ids.min() <= ids.max() < n_vocab:
            raise file.refused(f"damaged: a token is not in the vocabulary of {n_vocab}")
        self.ids = marked(ids.tolist(), file.tensor(KINDS) != 0)
        self.conversion: Conversion | None = None
        if source is not cache:
            self.conversion = Conversion(source, cache, self.held, file.tensor, n_tokens)
            self.held = self.conversion.held
            gone = tuple(rows.gone for rows in self.held)
            self.text = replace(self.text, gone=gone, exact_from=(0,) * len(gone))
        self._check_rows(exactly=exactly)

    def _wanted(self, source: KVCache) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each tensor."""
        n_tokens, n_states = self.text.n_tokens, len(self.text.states)
        wanted: dict[str, tuple[str, tuple[int, ...]]] = {
            IDS: ("I32", (n_tokens,)),
            KINDS: ("U8", (n_tokens,)),
        }
        for plane in planes(source):
            wanted[plane.name] = "U8", (self.held[plane.pool].of(plane).n_stored, *plane.row_shape)
        for name, shape, _ in _state_tensors(self.cache, []):
            wanted[name] = "F32", (n_states, *shape[1:])
        return wanted

    def _check_rows(self, *, exactly: bool) -> None:
        """Refuse a state that nothing could be used of, by the cache's own rules."""
        cache, text = self.cache, self.text
        trial = CachedSequence(len(cache.pools))
        trial.length, trial.n_stepped = text.n_tokens, -1
        trial.kept = [Checkpoint(length, None) for length in text.states]
        trial.gone = [set(gone) for gone in text.gone]
        trial.exact_from = list(text.exact_from)
        if not cache.reachable(trial, text.n_tokens, exactly=exactly):
            raise self.file.refused(
                "it lacks rows that this cache would have",
                hint="save it with the settings of the cache that it is to be loaded into",
            )

    def _converted(self, plane: PlaneRows) -> NDArray[np.uint8]:
        assert self.conversion is not None
        with np.errstate(all="ignore"):  # what is no number stays none
            return self.conversion.tensor(plane)

    @property
    def note(self) -> str:
        """What to tell the user once it has been put into the cache; empty if it is as saved."""
        if self.conversion is None:
            return ""
        was, now = self.file.metadata.get("types", ""), cache_identity(self.cache)["types"]
        kinds = f"from {quoted(was)} to {quoted(now)}" if was != now else "to another layout"
        return (
            f"K and V were converted {kinds}, which changed them by "
            f"{100 * self.conversion.relative_error:.2g} % (RMS): answers may differ from those of "
            "a prompt that is evaluated"
        )

    def put(self, sequence: CachedSequence) -> UsageError | None:
        """Give an empty sequence the text; what went wrong, if it is empty still."""
        cache, text, file = self.cache, self.text, self.file
        sequence.length, sequence.checkpoint = text.n_tokens, text.checkpoint
        fits = take_pages(cache, sequence, self.held)
        if fits:
            for plane in planes(cache):
                rows = (
                    file.tensor(plane.name) if self.conversion is None else self._converted(plane)
                )
                rows_in(cache, sequence, plane, self.held[plane.pool].of(plane), rows)
            layers = cache.states.layers.items()
            sequence.kept = checkpoints_in(
                cache,
                text.states,
                {i: file.tensor(f"layers.{i}.state.rows") for i, _ in layers},
                {
                    i: file.tensor(f"layers.{i}.state.memory")
                    for i, state in layers
                    if state.memory is not None
                },
            )
        if fits and file.is_unchanged():
            return None
        sequence.kept = []
        cache.cut_back(sequence, 0)
        if fits:
            return file.refused("it was changed while it was read", hint="load it again")
        return file.refused(
            "the cache has no room for it beside the texts in work",
            hint="wait for these, or use a larger cache",
        )


@dataclass(frozen=True)
class StateText:
    """Lengths and places of a text.

    Attributes:
        n_tokens: of the text.
        checkpoint: a length that it is likely to be cut back to, or 0.
        gone: of each pool, the places of pages that were given back.
        exact_from: of each pool; see `pages.Sequence`.
        states: the lengths after which states of recurrent layers were kept.
        rungs: of the pages, in a cache with a budget; else empty.
    """

    n_tokens: int
    checkpoint: int
    gone: tuple[tuple[int, ...], ...]
    exact_from: tuple[int, ...]
    states: tuple[int, ...]
    rungs: tuple[int, ...] = ()

    def as_json(self) -> str:
        """The text for the file's metadata."""
        found = asdict(self)
        if not self.rungs:
            del found["rungs"]
        return json.dumps(found)

    def held(self, cache: KVCache) -> list[HeldRows]:
        """The rows that are there of each of the cache's pools."""
        return [
            HeldRows(
                n_held(pool, self.n_tokens, rungs := self.rungs if pool is cache.ladder else ()),
                gone,
                exact_from,
                rungs,
            )
            for pool, gone, exact_from in zip(cache.pools, self.gone, self.exact_from, strict=True)
        ]


def read_state_text(text: str, cache: KVCache) -> StateText:
    """The inverse of `StateText.as_json`, for a cache of the same pools.

    Raises:
        ValueError: it is malformed, or can't be of such a cache.
    """
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("too deep") from error
    names = {"n_tokens", "checkpoint", "gone", "exact_from", "states"}
    if cache.ladder is not None:
        names.add("rungs")
    if not isinstance(data, dict) or data.keys() != names:
        raise ValueError("other keys")
    (n_tokens,) = _whole([data["n_tokens"]], 1, 1 << 31)
    (checkpoint,) = _whole([data["checkpoint"]], 0, n_tokens)
    if not isinstance(data["gone"], list) or len(data["gone"]) != len(cache.pools):
        raise ValueError("other pools")
    gone = []
    for pool, places in zip(cache.pools, data["gone"], strict=True):
        n_places = pages_for(max(0, n_tokens - pool.first))
        gone.append(_ascending(places, pool.kept, n_places - 1))
    exact_from = _whole(data["exact_from"], 0, n_tokens)
    if len(exact_from) != len(cache.pools):
        raise ValueError("other pools")
    states = _ascending(data["states"], 1, n_tokens)
    if states and not cache.states:
        raise ValueError("states without recurrent layers")
    rungs = tuple[int, ...]()
    if cache.ladder is not None:
        rungs = _whole(data["rungs"], 0, len(cache.ladder.sizes.units) - 1)
        if len(rungs) != pages_for(n_tokens) or gone[cache.ladder.index]:
            raise ValueError("other pages")
    return StateText(n_tokens, checkpoint, tuple(gone), exact_from, states, rungs)


def _whole(values: Any, least: int, most: int) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError("not a list")
    for value in values:
        if type(value) is not int or not least <= value <= most:
            raise ValueError("a number is out of its range")
    return tuple(values)


def _ascending(values: Any, least: int, most: int) -> tuple[int, ...]:
    found = _whole(values, least, most)
    if any(later <= earlier for earlier, later in pairwise(found)):
        raise ValueError("numbers are not in order")
    return found


def save_state(
    slot: CacheSlot,
    path: str | os.PathLike[str],
    identity: Mapping[str, str],
    ids: Sequence[int] | None = None,
) -> int:
    """Write the tokens that a slot holds with their rows to a file; returns how many there are.

    Args:
        identity: of the model (`loader.model_fingerprint.model_identity`).
        ids: write the text that begins most like these tokens instead.

    Raises:
        UsageError: there are none, or the file can't be written.
    """

    def work() -> int | UsageError:
        if (text := _latest(slot) if ids is None else _most_like(slot, ids)) is None:
            return UsageError("no text was evaluated, so there is no state to save")
        try:
            save_text(path, slot.cache, text.sequence, text.ids, identity)
        except UsageError as error:
            return error  # raised in the turn, it would cost what is cached
        return text.sequence.length

    found = slot.turn(work)
    if isinstance(found, UsageError):
        raise found
    return found


def _latest(slot: CacheSlot) -> KeptText | None:
    """The tokens that are held; if there are none, the text that was kept last."""
    if slot.ids:
        return KeptText(slot.sequence, marked(slot.ids, slot.generated))
    return slot.prefixes.texts[-1] if slot.prefixes.texts else None


def _most_like(slot: CacheSlot, ids: Sequence[int]) -> KeptText | None:
    """The text that begins most like some tokens: the one that is held, or a kept one."""
    wanted = np.asarray(ids, np.int64)
    texts = [text for text in (_latest(slot), _kept(slot, ids)) if text is not None]
    common = [n_common(text.ids % GENERATED, wanted) for text in texts]
    return texts[common.index(max(common))] if any(common) else None


def _kept(slot: CacheSlot, ids: Sequence[int]) -> KeptText | None:
    """The kept text that begins most like some tokens, whether they were a prompt or drawn."""
    wanted = np.asarray(ids, np.int64)
    best, most = None, 0
    for text in slot.prefixes.texts:
        n = n_common(text.ids % GENERATED, wanted)
        if n > most:
            best, most = text, n
    return best


def forget_text(slot: CacheSlot, ids: Sequence[int]) -> int:
    """Give the pages of a kept text back that has these tokens; returns how many it had."""

    def work() -> int:
        text = _kept(slot, ids)
        if text is None or n_common(text.ids % GENERATED, np.asarray(ids, np.int64)) < len(ids) - 1:
            return 0
        slot.prefixes.drop(text)
        return len(text.ids)

    return slot.turn(work)


def load_state(
    slot: CacheSlot,
    path: str | os.PathLike[str],
    identity: Mapping[str, str],
    *,
    convert: CacheConfig | None = None,
    on_note: Callable[[str], None] = lambda line: None,
) -> list[int]:
    """Keep the text of a file beside those that are cached; returns its token ids.

    Args:
        convert: the cache's settings, if rows of other types are to be packed again.
        on_note: told what that cost.

    Raises:
        UsageError: it can't be read, is damaged, or does not fit the model or the cache.
    """
    model = slot.model.config
    state = LoadedState(
        path,
        slot.cache,
        identity,
        model.n_vocab,
        exactly=slot.exact,
        convert=None if convert is None else (convert, tuple(model.groups)),
    )

    def work() -> UsageError | None:
        slot.leave()
        sequence = slot.cache.new_sequence(stepped=False)
        error = state.put(sequence)
        if error is None:
            slot.prefixes.keep(sequence, state.ids)
        return error

    error = slot.turn(work)
    if error is not None:
        raise error
    if state.note:
        on_note(state.note)
    return unmarked(state.ids)[0]
