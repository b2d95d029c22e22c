"""The texts that had the places last, saved to files and back, in the engine's process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from localkv.engine.saved_state import forget_text
from localkv.errors import UsageError
from localkv.llm import LLM
from localkv.server.running_text import RunningText
from localkv.server.wire import SlotAction, SlotDone


class SlotStates:
    """What `/slots/ID?action=...` does.

    Args:
        llm: keeps the texts.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._last = dict[int, list[int]]()

    def note(self, places: Sequence[int], text: RunningText) -> None:
        """A text has ended.

        Args:
            places: the numbers of texts that had them last; one that was quick never had any.
        """
        place, id = text.place, text.id
        if place < 0:
            place = places.index(id) if id in places else places.index(0) if 0 in places else 0
        self._last[place] = text.ids

    def act(self, action: SlotAction) -> SlotDone:
        """Save, restore or erase one.

        Raises:
            UsageError: there is none, or the file can't be used.
        """
        started, n_bytes = time.perf_counter(), 0
        if action.action == "restore":
            ids = self._last[action.place] = self._llm.load_state(action.path)
            n_tokens, n_bytes = len(ids), os.path.getsize(action.path)
        elif action.action == "save":
            n_tokens = self._llm.save_state(action.path, self._text(action.place))
            n_bytes = os.path.getsize(action.path)
        else:
            n_tokens = forget_text(self._llm.engine.slot, self._text(action.place))
            del self._last[action.place]
        return SlotDone(action.id, n_tokens, n_bytes, 1e3 * (time.perf_counter() - started))

    def _text(self, place: int) -> list[int]:
        if place not in self._last:
            raise UsageError(f"slot {place} has no text yet")
        return self._last[place]
