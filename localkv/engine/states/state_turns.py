"""Saving the text that an engine has evaluated last, and loading one beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from localkv.config import CacheConfig
from localkv.engine.slot.cache_slot import CacheSlot
from localkv.engine.slot.prefix_cache import KeptText
from localkv.engine.slot.token_text import GENERATED, marked, n_common, unmarked
from localkv.engine.states.saved_state import LoadedState, save_text
from localkv.errors import UsageError


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
        convert: the cache's settings, if rows of other types are to be packed anew.
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
