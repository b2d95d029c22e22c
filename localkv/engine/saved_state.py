"""A text's rows in a file, and back: what makes a state, and which cache it fits.

A state holds tokens, each with its kind, and all rows that the cache has of them, as the formats'
references order them; so a cache of another backend takes it, too, and one for a longer context.
Loaded, it is one of the texts that are kept (`PrefixCache`): prompts go on with what they have in
common with it, and with the bits that they would have if it had been evaluated here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import pages_for
from localkv.cache.pages import Checkpoint
from localkv.cache.pages import Sequence as CachedSequence
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
from localkv.engine.state_file import StateFile, StateTensor, in_parts, write_state
from localkv.engine.state_identity import (
    KIND,
    VERSION,
    Conversion,
    Groups,
    cache_as_saved,
    cache_identity,
    check_fits,
    check_model,
    fits,
)
from localkv.errors import UsageError, quoted

IDS, KINDS = "tokens.ids", "tokens.generated"
"""Tensors: int32 and uint8 [tokens]."""


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
        "text": text.as_json(),
    }
    tensors = [
        StateTensor(IDS, "I32", (len(ids),), in_parts((ids % GENERATED).astype(np.int32))),
        StateTensor(KINDS, "U8", (len(ids),), in_parts((ids >= GENERATED).astype(np.uint8))),
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
        row = cache.arrays.to_numpy(states.row(sequence)).copy()
        kept.append(Checkpoint(sequence.length, row))
    return kept


def _state_tensors(
    cache: KVCache, kept: list[Checkpoint]
) -> Iterator[tuple[str, tuple[int, ...], NDArray[np.float32]]]:
    for i, state in cache.states.layers.items():
        rows = conv_out(state, kept)
        yield f"layers.{i}.state.rows", rows.shape, rows
        if state.memory is not None:
            memory = memory_out(cache.arrays, state, kept)
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
        ids: write the kept text that has most of these tokens in common with its beginning instead.

    Raises:
        UsageError: there are none, or the file can't be written.
    """

    def work() -> int | UsageError:
        if (text := _latest(slot) if ids is None else _kept(slot, ids)) is None:
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
