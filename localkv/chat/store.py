"""Sessions on disk: one SQLite file, which several programs may have open at a time.

Its rows become values here, and a damaged row is an error, never a wrong value. `KeptStates` are
the files beside it, which hold what the sessions' models have evaluated.
"""

from __future__ import annotations

import functools
import json
import math
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from localkv.chat.conversation import ENDINGS, Conversation, Message, Role, conversation_of
from localkv.chat.database import (
    PATIENCE,
    SCHEMA_VERSION,
    DamagedStoreError,
    Database,
    SessionGoneError,
    damaged,
    default_path,
)
from localkv.chat.engine import Finished
from localkv.errors import LocalKVError, UsageError
from localkv.sampling.params import SamplingParams

MESSAGE_COLUMNS = "id, parent_id, role, content, finish_reason, stats, error"

_FINISHED = {field.name for field in fields(Finished)}


def message_of(row: Sequence[Any]) -> Message:
    """The message of a row of `MESSAGE_COLUMNS`.

    Raises:
        ValueError: it is damaged.
    """
    number, parent_id, role, content, reason, stats, error = row
    if role not in get_args(Role):
        raise ValueError(f"message {number} is neither the user's nor an answer")
    try:
        values = (parent_id, role, content, reason, None, error)
        message = checked(Message, dict(zip(_MESSAGE_FIELDS, (number, *values), strict=True)))
        check_ending(reason)
        message.stats = stats_of(stats)
    except ValueError as wrong:
        raise ValueError(f"message {number}: {wrong}") from None
    return message


_MESSAGE_FIELDS = [field.name for field in fields(Message)]


def check_ending(reason: Any) -> None:
    """Refuse what is no `finish_reason` of a message.

    Raises:
        ValueError: it is none.
    """
    if reason is not None and reason not in ENDINGS:
        raise ValueError(f"its finish_reason is {reason!r:.60}")


def stats_of(text: Any) -> Finished | None:
    """The figures of an answer; fields of later versions are left out.

    Raises:
        ValueError: they are damaged.
    """
    if text is None:
        return None
    values = _json_object(text, "stats")
    return checked(Finished, {k: v for k, v in values.items() if k in _FINISHED})


def settings_of(text: Any) -> Mapping[str, Any]:
    """The settings of a session.

    Raises:
        ValueError: it is damaged.
    """
    settings = _json_object(text, "settings")
    chosen_settings(settings)
    return settings


@dataclass(frozen=True)
class SessionCache:
    """The largest context that a session ran with, and the types of K and V in it.

    Attributes:
        n_ctx: tokens; None if it has not run here.
        type_k, type_v: None where layers have types of their own.
        model: the file that it ran with.
    """

    n_ctx: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    model: str = ""


@dataclass(frozen=True)
class ChosenSettings:
    """The settings of a session.

    Attributes:
        params: how tokens are drawn.
        max_tokens: at most; None is as many as there is room for.
        think, prefill: as in `ChatRequest`.
        cache: that it ran with.
    """

    params: SamplingParams
    max_tokens: int | None = None
    think: bool | None = None
    prefill: str = ""
    cache: SessionCache = SessionCache()


def chosen_settings(settings: Mapping[str, Any]) -> ChosenSettings:
    """The values of stored settings.

    Raises:
        ValueError: there are no such settings, or they have no such values.
    """
    values = dict(settings)
    others = {name: values.pop(name) for name in _NOT_SAMPLING if name in values}
    cache = others.pop("cache", {})
    if not isinstance(cache, Mapping):
        raise ValueError(f"its cache is {repr(cache)[:60]}")
    try:
        others["cache"] = checked(SessionCache, cache)
        params = sampling_params_from_json({**asdict(SamplingParams()), **values})
        chosen = checked(ChosenSettings, {"params": params, **others})
    except UsageError as error:
        raise ValueError(error.message) from None
    if chosen.max_tokens is not None and chosen.max_tokens < 0:
        raise ValueError(f"its max_tokens is {chosen.max_tokens}")
    if chosen.cache.n_ctx is not None and chosen.cache.n_ctx < 1:
        raise ValueError(f"its context is {chosen.cache.n_ctx}")
    return chosen


_NOT_SAMPLING = ("max_tokens", "think", "prefill", "cache")


def _json_object(text: Any, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"its {name} can't be read")
    return value


def sampling_params_from_json(fields: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` from its `asdict` after JSON.

    Raises:
        ValueError: a field is unknown or of another type.
        UsageError: a value makes no sense.
    """
    known = _with_tuples(fields)
    bias = known.get("logit_bias", {})
    if isinstance(bias, dict):
        known["logit_bias"] = {int(token): amount for token, amount in bias.items()}
    return checked(SamplingParams, known)


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


T = TypeVar("T")


def checked(cls: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from its fields, which must have their declared types.

    Raises:
        ValueError: one is unknown, missing or of another type.
    """
    types = _field_types(cls)  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in types:
            raise ValueError(f"it has {name[:60]!r}, which is unknown here")
        if not _fits(value, types[name]):
            raise ValueError(f"its {name} is {repr(value)[:60]}")
    try:
        return cls(**values)
    except TypeError:
        missing = [name for name in types if name not in values]
        raise ValueError(f"it has no {missing[0] if missing else 'fields'}") from None


@functools.cache
def _field_types(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value out of JSON has the type of a field."""
    kind, of = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return True
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in of)
    if kind is Literal:
        return isinstance(value, str) and value in of
    if kind in (tuple, Sequence):
        return isinstance(value, tuple) and all(_fits(item, of[0]) for item in value)
    if kind is Mapping:
        return isinstance(value, dict) and all(_is_entry(entry, of) for entry in value.items())
    if wanted is float:
        return type(value) in (int, float) and abs(value) < math.inf
    if wanted is int:
        return type(value) is int and abs(value) < 1 << 63
    return type(value) is wanted


def _is_entry(entry: tuple[Any, Any], of: tuple[Any, ...]) -> bool:
    """Whether an entry of a mapping fits; a bias may be -inf, which forbids a token."""
    key, value = entry
    return _fits(key, of[0]) and (_fits(value, of[1]) or (of[1] is float and value == -math.inf))


__all__ = [
    "SCHEMA_VERSION",
    "DamagedStoreError",
    "SessionGoneError",
    "SessionSummary",
    "Store",
    "StoredSession",
    "default_path",
]

LATEST = 1e11
"""Seconds since the epoch; a later time is damage."""


@dataclass(frozen=True)
class SessionSummary:
    """A session in a list. `updated` is in seconds since the epoch."""

    id: int
    title: str
    model: str
    n_messages: int
    updated: float


@dataclass
class StoredSession:
    """A session as it was left.

    Attributes:
        settings: fields of `SamplingParams` that differ from their defaults, and "max_tokens".
    """

    id: int
    title: str
    model: str
    system_prompt: str
    settings: Mapping[str, Any]
    conversation: Conversation


class Store:
    """The file of sessions; made where there is none.

    It and every method raise the errors of `Database`: damage is an error, never a wrong value.

    Args:
        path: as `Database` takes it.
    """

    def __init__(self, path: str | Path) -> None:
        self._db = Database(path)

    def close(self) -> None:
        self._db.close()

    def add_session(
        self, title: str, model: str, system_prompt: str, settings: Mapping[str, Any]
    ) -> int:
        """Begin a session; its id."""
        now = time.time()
        texts = (title, model, system_prompt, json.dumps(dict(settings)))
        columns = "title, model, system_prompt, settings, created, updated"
        with self._db.change() as db:
            done = db.execute(
                f"INSERT INTO sessions ({columns}) VALUES (?, ?, ?, ?, ?, ?)",
                (*map(_storable, texts), now, now),
            )
        assert done.lastrowid is not None
        return done.lastrowid

    def update_session(
        self,
        session_id: int,
        *,
        title: str,
        model: str,
        system_prompt: str,
        settings: Mapping[str, Any],
        leaf_id: int | None,
        dropped_id: int | None,
    ) -> None:
        """Write everything but the messages.

        Raises:
            SessionGoneError: another chat has deleted it.
        """
        texts = (title, model, system_prompt, json.dumps(dict(settings)))
        with self._db.change() as db:
            done = db.execute(
                "UPDATE sessions SET title = ?, model = ?, system_prompt = ?, settings = ?, "
                "leaf_id = ?, dropped_id = ?, updated = ? WHERE id = ?",
                (*map(_storable, texts), leaf_id, dropped_id, time.time(), session_id),
            )
        _require(done)

    def delete_session(self, session_id: int) -> None:
        with self._db.change(foreign_keys=False) as db:  # all that follow a message go, too
            db.execute("DELETE FROM messages WHERE session_id = ?", (session_id,))
            db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))

    def sessions(self, search: str = "") -> list[SessionSummary]:
        """Sessions with a title or a message that contains every word, the newest first.

        A damaged session is listed as far as it can be read; `session` raises the error.
        """
        where, values = "1", []
        for word in _storable(search).split():
            where += (
                " AND (title LIKE ? ESCAPE '\\' OR EXISTS (SELECT 1 FROM messages WHERE "
                "session_id = sessions.id AND content LIKE ? ESCAPE '\\'))"
            )
            pattern = "%" + word.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_") + "%"
            values += [pattern, pattern]
        rows = self._db.rows(
            "SELECT id, title, model, (SELECT COUNT(*) FROM messages WHERE session_id = "
            f"sessions.id), updated FROM sessions WHERE {where} ORDER BY updated DESC, id DESC",
            values,
        )
        return [_summary(row) for row in rows]

    def session(self, session_id: int) -> StoredSession:
        """A session with its messages.

        Raises:
            LocalKVError: there is no such session.
            DamagedStoreError: it can't be read as it is.
        """
        rows = self._db.rows(
            "SELECT title, model, system_prompt, leaf_id, dropped_id, settings FROM sessions "
            "WHERE id = ?",
            (session_id,),
        )
        if not rows:
            raise LocalKVError(f"there is no session {session_id}")
        title, model, system_prompt, leaf_id, dropped_id, settings = rows[0]
        messages = self._db.rows(
            f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE session_id = ? ORDER BY id",
            (session_id,),
        )
        try:
            if not all(isinstance(text, str) for text in (title, model, system_prompt)):
                raise ValueError("a text is none")
            conversation = conversation_of(map(message_of, messages), leaf_id)
            conversation.dropped_id = dropped_id
            chosen = settings_of(settings)
        except ValueError as error:
            raise damaged(self._db.path, f"session {session_id} is damaged: {error}") from None
        return StoredSession(session_id, title, model, system_prompt, chosen, conversation)

    def add_message(
        self, session_id: int, parent_id: int | None, role: Role, content: str
    ) -> Message:
        """Store a new message.

        Raises:
            SessionGoneError: another chat has deleted the session.
        """
        with self._db.change() as db:
            try:
                done = db.execute(
                    "INSERT INTO messages (session_id, parent_id, role, content, created) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (session_id, parent_id, role, _storable(content), time.time()),
                )
            except sqlite3.IntegrityError:
                raise _gone() from None
        assert done.lastrowid is not None
        return Message(done.lastrowid, parent_id, role, content)

    def update_message(self, message: Message, *, patience: float = PATIENCE) -> None:
        """Write the text of a message so far, and how it ended.

        Args:
            message: one that was stored.
            patience: seconds to wait for another chat that is writing.

        Raises:
            SessionGoneError: another chat has deleted the session.
        """
        texts = (
            message.content,
            message.finish_reason,
            json.dumps(asdict(message.stats)) if message.stats else None,
            message.error,
        )
        with self._db.change(patience) as db:
            done = db.execute(
                "UPDATE messages SET content = ?, finish_reason = ?, stats = ?, error = ? "
                "WHERE id = ?",
                (*(text if text is None else _storable(text) for text in texts), message.id),
            )
        _require(done)

    def delete_message(self, message_id: int) -> None:
        """Delete a message, unless another chat has gone on from it."""
        with self._db.change() as db:
            db.execute(
                "DELETE FROM messages WHERE id = ? AND NOT EXISTS "
                "(SELECT 1 FROM messages WHERE parent_id = ?)",
                (message_id, message_id),
            )

    def prompts(self, limit: int = 200) -> list[str]:
        """The latest prompts of all sessions; the oldest first, each text once."""
        rows = self._db.rows(
            "SELECT content FROM messages WHERE role = 'user' AND typeof(content) = 'text' "
            "GROUP BY content ORDER BY MAX(id) DESC LIMIT ?",
            (limit,),
        )
        return [content for (content,) in rows][::-1]

    def preference(self, name: str) -> str | None:
        rows = self._db.rows("SELECT value FROM preferences WHERE name = ?", (name,))
        return str(rows[0][0]) if rows else None

    def set_preference(self, name: str, value: str) -> None:
        with self._db.change() as db:
            db.execute(
                "INSERT INTO preferences VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (name, _storable(value)),
            )


def _storable(text: str) -> str:
    """Text as UTF-8 can hold it: halves of a surrogate pair are joined, or replaced."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _summary(row: Sequence[Any]) -> SessionSummary:
    number, title, model, n_messages, updated = row
    return SessionSummary(
        number,
        title if isinstance(title, str) else "(damaged)",
        model if isinstance(model, str) else "(damaged)",
        n_messages,
        updated if isinstance(updated, float) and 0 <= updated < LATEST else 0.0,
    )


def _require(done: sqlite3.Cursor) -> None:
    """Something was there to be updated."""
    if not done.rowcount:
        raise _gone()


def _gone() -> SessionGoneError:
    return SessionGoneError(
        "another chat has deleted this session, and nothing of it is stored any more",
        hint="/export keeps the text on the screen, Ctrl+N begins a new chat",
    )


class KeptStates:
    """States of sessions (docs/states.md), beside the file of the sessions.

    Args:
        sessions: the file of the sessions.
    """

    def __init__(self, sessions: Path) -> None:
        self.folder = sessions.with_name(f"{sessions.name}.states")

    def path(self, session_id: int) -> Path:
        """Where a session's state is, or is to be."""
        return self.folder / f"{session_id}.safetensors"

    def prepared(self, session_id: int) -> Path:
        """Where a session's state is to be: its folder is made, and only the user may read it.

        Raises:
            OSError: it can't be made.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.path(session_id)

    def found(self, session_id: int | None) -> Path | None:
        """Where a session's state is, if there is one."""
        path = None if session_id is None else self.path(session_id)
        return path if path is not None and path.is_file() else None

    def forget(self, session_id: int) -> None:
        """A session was deleted."""
        with suppress(OSError):
            self.path(session_id).unlink(missing_ok=True)
