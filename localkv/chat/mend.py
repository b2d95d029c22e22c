"""`mend`: rows that were salvaged, as rows that a chat can read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from localkv.chat.conversation import Role
from localkv.chat.salvage import LARGEST_ID, Row, Salvaged
from localkv.chat.store import LATEST
from localkv.chat.stored_row import check_ending, settings_of, stats_of

UNTITLED = "Saved chat"


@dataclass
class Mended:
    """Rows in the order of `schema.COLUMNS`.

    Attributes:
        n_changed: values that made no sense, and were replaced or left out.
        n_lost: messages that something refers to and nobody has found.
    """

    sessions: list[Row]
    messages: list[Row]
    preferences: dict[str, str]
    n_changed: int
    n_lost: int


def mend(found: Salvaged) -> Mended:
    """Complete the rows; no message and no session is left out."""
    return _Mending(found).result()


class _Mending:
    def __init__(self, found: Salvaged) -> None:
        self.found = found
        self.n_changed = 0
        self.now = time.time()
        self.messages: dict[int, Row] = {}
        self.latest: dict[int, int] = {}
        self.session_ids = _numbered(found.sessions)
        self.message_ids = _numbered(found.messages)
        self.lost: set[int] = set()

    def result(self) -> Mended:
        for number, row in sorted(self.found.messages.items(), key=lambda item: _order(item[0])):
            message = self._message(self.message_ids[number], row)
            self.messages[message[0]] = message
            self.latest[message[1]] = message[0]
        sessions = [
            self._session(self.session_ids[n], row) for n, row in self.found.sessions.items()
        ]
        orphaned = sorted(set(self.latest) - set(self.session_ids.values()))
        self.n_changed += len(orphaned)
        sessions += [self._session(number, None) for number in orphaned]
        lost = len(self.lost - set(self.found.messages))
        return Mended(
            sessions,
            list(self.messages.values()),
            self.found.preferences,
            self.n_changed,
            max(self.found.n_missing, lost),
        )

    def _replaced(self, value: Any, by: Any, *, sound: bool) -> Any:
        self.n_changed += not sound
        return value if sound else by

    def _text(self, value: Any, default: str = "") -> str:
        """Text, or the nearest thing to it."""
        if isinstance(value, bytes):
            default = value.decode(errors="replace")
        elif isinstance(value, int | float):
            default = str(value)
        text: str = self._replaced(value, default, sound=isinstance(value, str))
        return text

    def _time(self, value: Any) -> float:
        sound = isinstance(value, int | float) and 0 <= value < LATEST
        return float(self._replaced(value, self.now, sound=sound))

    def _optional(self, value: Any, read: Any) -> Any:
        """A value that `read` takes, or None."""
        try:
            read(value)
        except ValueError:
            self.n_changed += 1
            return None
        return value

    def _message(self, number: int, row: Row) -> Row:
        _, session_id, parent_id, role, content, reason, stats, error, created = row
        self.n_changed += number != row[0]
        session_id = self._session_of(session_id, parent_id)
        parent = self._parent(number, session_id, parent_id)
        if role not in get_args(Role):
            answers = parent is not None and self.messages[parent][3] == "user"
            role = self._replaced(role, "assistant" if answers else "user", sound=False)
        optional = (
            self._optional(reason, check_ending),
            self._optional(stats, stats_of),
            self._optional(error, _check_text),
        )
        values = (number, session_id, parent, role, self._text(content), *optional)
        return (*values, self._time(created))

    def _session_of(self, session_id: Any, parent_id: Any) -> int:
        """The session of a message; where that makes no sense, that of the message before it."""
        if isinstance(session_id, int) and 0 < session_id < LARGEST_ID:
            return self.session_ids.get(session_id, session_id)
        self.n_changed += 1
        before = self.messages.get(parent_id) if isinstance(parent_id, int) else None
        if before is not None:
            return int(before[1])
        return self.session_ids.get(session_id) or max(self.session_ids.values(), default=0) + 1

    def _parent(self, number: int, session_id: int, parent_id: Any) -> int | None:
        """A message's parent: the stored one, or else the message before it in its session."""
        if parent_id is None:
            return None
        parent = self.message_ids.get(parent_id) if isinstance(parent_id, int) else None
        if parent in self.messages and self.messages[parent][1] == session_id:
            return parent
        if isinstance(parent_id, int) and 0 < parent_id < min(number, LARGEST_ID):
            self.lost.add(parent_id)
        self.n_changed += 1
        return self.latest.get(session_id)

    def _session(self, number: int, row: Row | None) -> Row:
        last = self.latest.get(number)
        if row is None:
            return (number, UNTITLED, "", "", "{}", last, None, self.now, self.now)
        _, title, model, system_prompt, settings, leaf_id, dropped_id, created, updated = row
        self.n_changed += number != row[0]
        leaf_id, dropped_id = (
            self._replaced(
                self.message_ids.get(stored) if isinstance(stored, int) else None,
                default,
                sound=stored is None or self._is_in(stored, number),
            )
            for stored, default in ((leaf_id, last), (dropped_id, None))
        )
        return (
            number,
            self._text(title, UNTITLED),
            self._text(model),
            self._text(system_prompt),
            self._optional(settings, settings_of) or "{}",
            leaf_id,
            dropped_id,
            self._time(created),
            self._time(updated),
        )

    def _is_in(self, message_id: Any, session_id: int) -> bool:
        number = self.message_ids.get(message_id) if isinstance(message_id, int) else None
        return number in self.messages and self.messages[number][1] == session_id


def _order(number: int) -> tuple[bool, int]:
    """Ids that make no sense come last."""
    return not 0 < number < LARGEST_ID, number


def _numbered(rows: Mapping[int, Row]) -> dict[int, int]:
    """An id for each that was found: its own, unless that makes no sense."""
    numbers = {number: number for number in rows if 0 < number < LARGEST_ID}
    following = max(numbers, default=0) + 1
    for number in sorted(set(rows) - set(numbers)):
        numbers[number] = following
        following += 1
    return numbers


def _check_text(value: Any) -> None:
    if not isinstance(value, str | None):
        raise ValueError
