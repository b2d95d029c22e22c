"""Sessions on disk: one SQLite file, which several programs may have open at a time."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localkv.chat.conversation import Conversation, Message, Role, conversation_of
from localkv.chat.engine import Finished
from localkv.errors import LocalKVError, printable

_MIGRATIONS = (
    """
    CREATE TABLE sessions (
        id INTEGER PRIMARY KEY,
        title TEXT NOT NULL,
        model TEXT NOT NULL,
        system_prompt TEXT NOT NULL,
        settings TEXT NOT NULL,
        leaf_id INTEGER,
        dropped_id INTEGER,
        created REAL NOT NULL,
        updated REAL NOT NULL
    );
    CREATE TABLE messages (
        id INTEGER PRIMARY KEY,
        session_id INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
        parent_id INTEGER REFERENCES messages (id),
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        finish_reason TEXT,
        stats TEXT,
        error TEXT,
        created REAL NOT NULL
    );
    CREATE INDEX messages_of_session ON messages (session_id);
    CREATE TABLE preferences (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    """,
)
"""From each version of the schema to the next; PRAGMA user_version counts them."""

SCHEMA_VERSION = len(_MIGRATIONS)


def default_path() -> Path:
    """Where sessions are kept: the platform's data folder (~/.local/share/localkv on Linux)."""
    from platformdirs import user_data_path

    return user_data_path("localkv", appauthor=False) / "chats.sqlite3"


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

    Args:
        path: the file, or ":memory:".

    Raises:
        LocalKVError: it can't be used, or a newer localkv made it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        try:
            if path != ":memory:":
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=5.0)
            try:
                self._prepare()
            except Exception:
                self.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> LocalKVError:
        return LocalKVError(f"{printable(self.path)}: {error}", hint="--sessions names another")

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        with self._change() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise LocalKVError(
                    f"{printable(self.path)}: made by a newer localkv (version {version})",
                    hint="--sessions names another file",
                )
            for number, script in enumerate(_MIGRATIONS[version:], version + 1):
                for statement in script.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {number}")

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """One transaction, which nobody else's interrupts."""
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def close(self) -> None:
        self._db.close()

    def add_session(
        self, title: str, model: str, system_prompt: str, settings: Mapping[str, Any]
    ) -> int:
        """Begin a session; its id."""
        now = time.time()
        with self._change() as db:
            row = (title, model, system_prompt, json.dumps(dict(settings)), now, now)
            columns = "title, model, system_prompt, settings, created, updated"
            done = db.execute(f"INSERT INTO sessions ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)
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
        """Write everything but the messages."""
        with self._change() as db:
            db.execute(
                "UPDATE sessions SET title = ?, model = ?, system_prompt = ?, settings = ?, "
                "leaf_id = ?, dropped_id = ?, updated = ? WHERE id = ?",
                (
                    title,
                    model,
                    system_prompt,
                    json.dumps(dict(settings)),
                    leaf_id,
                    dropped_id,
                    time.time(),
                    session_id,
                ),
            )

    def delete_session(self, session_id: int) -> None:
        with self._change() as db:
            db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))

    def sessions(self, search: str = "") -> list[SessionSummary]:
        """Sessions with a title or a message that contains every word, the newest first."""
        where, values = "1", []
        for word in search.split():
            where += (
                " AND (title LIKE ? ESCAPE '\\' OR EXISTS (SELECT 1 FROM messages WHERE "
                "session_id = sessions.id AND content LIKE ? ESCAPE '\\'))"
            )
            pattern = "%" + word.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_") + "%"
            values += [pattern, pattern]
        rows = self._db.execute(
            "SELECT id, title, model, (SELECT COUNT(*) FROM messages WHERE session_id = "
            f"sessions.id), updated FROM sessions WHERE {where} ORDER BY updated DESC, id DESC",
            values,
        )
        return [SessionSummary(*row) for row in rows]

    def session(self, session_id: int) -> StoredSession:
        """A session with its messages.

        Raises:
            LocalKVError: there is no such session.
        """
        row = self._db.execute(
            "SELECT title, model, system_prompt, settings, leaf_id, dropped_id FROM sessions "
            "WHERE id = ?",
            (session_id,),
        ).fetchone()
        if row is None:
            raise LocalKVError(f"there is no session {session_id}")
        title, model, system_prompt, settings, leaf_id, dropped_id = row
        conversation = conversation_of(self._messages(session_id), leaf_id)
        conversation.dropped_id = dropped_id
        return StoredSession(
            session_id, title, model, system_prompt, json.loads(settings), conversation
        )

    def _messages(self, session_id: int) -> Iterator[Message]:
        rows = self._db.execute(
            "SELECT id, parent_id, role, content, finish_reason, stats, error FROM messages "
            "WHERE session_id = ? ORDER BY id",
            (session_id,),
        )
        for number, parent_id, role, content, reason, stats, error in rows:
            finished = Finished(**json.loads(stats)) if stats else None
            yield Message(number, parent_id, role, content, reason, finished, error)

    def add_message(
        self, session_id: int, parent_id: int | None, role: Role, content: str
    ) -> Message:
        """Store a new message."""
        with self._change() as db:
            done = db.execute(
                "INSERT INTO messages (session_id, parent_id, role, content, created) "
                "VALUES (?, ?, ?, ?, ?)",
                (session_id, parent_id, role, content, time.time()),
            )
        assert done.lastrowid is not None
        return Message(done.lastrowid, parent_id, role, content)

    def update_message(self, message: Message) -> None:
        stats = json.dumps(asdict(message.stats)) if message.stats else None
        with self._change() as db:
            db.execute(
                "UPDATE messages SET content = ?, finish_reason = ?, stats = ?, error = ? "
                "WHERE id = ?",
                (message.content, message.finish_reason, stats, message.error, message.id),
            )

    def delete_message(self, message_id: int) -> None:
        """Delete a message that nothing follows."""
        with self._change() as db:
            db.execute("DELETE FROM messages WHERE id = ?", (message_id,))

    def prompts(self, limit: int = 200) -> list[str]:
        """What users wrote last, in all sessions; the oldest first, each text once."""
        rows = self._db.execute(
            "SELECT content FROM messages WHERE role = 'user' GROUP BY content "
            "ORDER BY MAX(id) DESC LIMIT ?",
            (limit,),
        )
        return [content for (content,) in rows][::-1]

    def preference(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM preferences WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def set_preference(self, name: str, value: str) -> None:
        with self._change() as db:
            db.execute(
                "INSERT INTO preferences VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (name, value),
            )
