"""`repair` sets a damaged file of sessions aside and begins a new one with what can still be read.

SQLite does the reading. `salvage` selects rows in order, from both ends and, where a page can't be
read, in ever smaller ranges around it; the index tells which messages there were. `mend` completes
these rows so that a chat can read them. Rows in pages that SQLite no longer finds, because the
pages that lead to them are damaged, are not searched for: the damaged file keeps them.

The damaged file is only read, and in the end renamed. All work is done on a copy in a folder beside
it, which is removed.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, get_args

from localkv.chat.conversation import Role
from localkv.chat.database import (
    COLUMNS,
    SCHEMA_VERSION,
    SIDECARS,
    SQLITE_ERRORS,
    Database,
    damage_of,
    default_path,
    tighten,
    version_of,
)
from localkv.chat.store import LATEST, Store, check_ending, settings_of, stats_of
from localkv.errors import LocalKVError, printable

LARGEST_ID = 1 << 40
"""A higher rowid is damage."""
LEAST_ID = -(1 << 63)
MOST_QUERIES = 20_000
"""Queries on one table, around unreadable places, before the rest is given up."""
BEYOND = 1000
"""Rowids that are tried above the highest one that is known."""
UNTITLED = "Saved chat"

Row = tuple[Any, ...]

_MAGIC = b"SQLite format 3\0"
_LOCK_AT, _LOCK_BYTES = 0x40000000, 512
"""Where SQLite locks a database: nothing is stored in these bytes."""


@dataclass(frozen=True)
class Repaired:
    """The result of a repair.

    Attributes:
        kept: the damaged file under its new name; None where nothing was wrong or changed.
        n_sessions, n_messages: that are in the file now.
        n_changed: values that made no sense, and were replaced or left out.
        n_lost: messages that are known of and could not be read; there may be more.
    """

    kept: Path | None
    n_sessions: int
    n_messages: int
    n_changed: int
    n_lost: int


def repair(path: str | Path) -> Repaired:
    """Begin a new file with everything readable, and keep the damaged one beside it.

    Raises:
        LocalKVError: there is no such file, a chat has it open, a newer localkv made it, or there
            is nothing in it to be saved. Nothing was changed then.
    """
    file = Path(os.path.realpath(path))
    try:
        _check_there(file)
        with _opened_alone(file) as source, _work_folder(file) as folder:
            return _repair(file, source, folder)
    except (OSError, *SQLITE_ERRORS) as error:
        what = getattr(error, "strerror", None) or error
        raise LocalKVError(f"{printable(path)} can't be repaired: {what}") from error


def _check_there(file: Path) -> None:
    if file.exists() and not stat.S_ISREG(file.stat().st_mode):
        raise LocalKVError(f"{printable(file)} is not a file")
    if not any(Path(f"{file}{suffix}").exists() for suffix in ("", *SIDECARS)):
        raise LocalKVError(f"{printable(file)}: no such file, so there is nothing to repair")


@contextmanager
def _opened_alone(file: Path) -> Iterator[BinaryIO | None]:
    """The file, while no chat can have it open; None where only its log is there.

    It must not be opened a second time meanwhile: closing that would end the lock.
    """
    if not file.exists():
        yield None
        return
    with file.open("r+b") as source:
        with suppress(ImportError):  # Windows has other locks, and renames no file that is open
            import fcntl

            try:
                fcntl.lockf(source, fcntl.LOCK_EX | fcntl.LOCK_NB, _LOCK_BYTES, _LOCK_AT)
            except OSError:
                raise LocalKVError(
                    f"{printable(file)}: another program has it open",
                    hint="end all chats first (Ctrl+Q)",
                ) from None
        yield source


@contextmanager
def _work_folder(file: Path) -> Iterator[Path]:
    """A private folder on the same disk."""
    with tempfile.TemporaryDirectory(prefix=f"{file.name[:100]}.repair-", dir=file.parent) as name:
        yield Path(name)


def _repair(file: Path, source: BinaryIO | None, folder: Path) -> Repaired:
    copy = _copied(file, source, folder / "copy")
    sound = _has_bytes(source) and _is_sound(copy)
    found = salvage(copy)
    mended = mend(found)
    counts = len(mended.sessions), len(mended.messages), mended.n_changed, mended.n_lost
    if sound and found.sound and not mended.n_changed and not mended.n_lost:
        return Repaired(None, *counts)
    if not any((mended.sessions, mended.messages, mended.preferences)):
        _check_ours(file, source)
    new = folder / "new"
    _write(new, mended)
    kept = _set_aside(file)
    if file.exists():
        raise LocalKVError(
            f"{printable(file)} was made again meanwhile; the damaged one is {printable(kept)}",
            hint="end all chats, and repair that one with --sessions",
        )
    new.rename(file)
    return Repaired(kept, *counts)


def _copied(file: Path, source: BinaryIO | None, copy: Path) -> Path:
    """A copy of the database and of the files that SQLite reads with it.

    A log without its database gets an empty one, to which SQLite then applies it.
    """
    if source is None or not _has_bytes(source):
        Store(copy).close()
    else:
        with copy.open("wb") as target:
            source.seek(0)
            shutil.copyfileobj(source, target)
    for suffix in ("-wal", "-journal"):
        with suppress(FileNotFoundError):
            shutil.copyfile(f"{file}{suffix}", f"{copy}{suffix}")
    return copy


def _has_bytes(source: BinaryIO | None) -> bool:
    return source is not None and os.fstat(source.fileno()).st_size > 0


def _is_sound(copy: Path) -> bool:
    """Whether SQLite finds nothing wrong.

    Raises:
        LocalKVError: it is sound, but a newer localkv made it.
    """
    try:
        with closing(sqlite3.connect(copy)) as db:
            sound = damage_of(db) is None
            sound &= db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            newer = version_of(db) > SCHEMA_VERSION
            if newer and sound and _tables(db) != _tables_of_now():
                raise LocalKVError(f"made by a newer localkv (version {version_of(db)})")
            sound &= version_of(db) == SCHEMA_VERSION
            return sound and not db.execute("PRAGMA foreign_key_check").fetchall()
    except SQLITE_ERRORS:
        return False


def _tables(db: sqlite3.Connection) -> list[tuple[str, ...]]:
    return db.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()


def _tables_of_now() -> list[tuple[str, ...]]:
    db = Database(":memory:")
    try:
        return db.rows("SELECT name, sql FROM sqlite_master ORDER BY name")
    finally:
        db.close()


def _check_ours(file: Path, source: BinaryIO | None) -> None:
    """Not to take somebody's letters for a damaged database."""
    start = b""
    if source is not None:
        source.seek(0)
        start = source.read(len(_MAGIC))
    if start == _MAGIC or file == Path(os.path.realpath(default_path())):
        return
    raise LocalKVError(
        f"{printable(file)}: there is nothing in it that could be saved",
        hint="move it away, and the next chat begins a new one",
    )


def _write(new: Path, mended: Mended) -> None:
    """Write a new file, and look whether all of it can be read."""
    with closing(Database(new)) as database, database.change(foreign_keys=False) as db:
        for table, rows in (
            ("sessions", mended.sessions),
            ("messages", mended.messages),
            ("preferences", list(mended.preferences.items())),
        ):
            places = ", ".join("?" * len(COLUMNS[table].split(", ")))
            db.executemany(f"INSERT INTO {table} VALUES ({places})", rows)
    with closing(Store(new)) as store:
        n_read = [len(store.session(s.id).conversation.messages) for s in store.sessions()]
    if (len(n_read), sum(n_read)) != (len(mended.sessions), len(mended.messages)):
        raise LocalKVError(f"{printable(new)}: not all that was saved can be read; a bug")


def _set_aside(file: Path) -> Path:
    """Rename a file and those that belong to it; the file comes last: a log alone is noticed."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{file}.damaged-{stamp}{n}" for n in ("", *(f"-{i}" for i in range(2, 1000))))
    kept = next(Path(name) for name in names if not Path(name).exists())
    for suffix in (*SIDECARS, ""):
        with suppress(FileNotFoundError):
            tighten(Path(f"{file}{suffix}"))
            os.rename(f"{file}{suffix}", f"{kept}{suffix}")
    return kept


@dataclass
class Salvaged:
    """The rows that were found, by id, with values in the order of `schema.COLUMNS`.

    Attributes:
        sessions, messages: the rows.
        preferences: by name.
        n_missing: messages that the index knows and that can't be read.
        sound: SQLite has read all of it without an error.
    """

    sessions: dict[int, Row] = field(default_factory=dict)
    messages: dict[int, Row] = field(default_factory=dict)
    preferences: dict[str, str] = field(default_factory=dict)
    n_missing: int = 0
    sound: bool = True


def salvage(file: Path) -> Salvaged:
    """Select everything that SQLite can read in a file that nobody else has open."""
    found = Salvaged()
    with closing(sqlite3.connect(file)) as db:
        db.text_factory = lambda raw: raw.decode(errors="replace")
        with suppress(*SQLITE_ERRORS):
            # A damaged definition, such as an index's, then hides nothing else.
            db.execute("PRAGMA writable_schema = ON")
        owners, complete = _indexed(db)
        known = set(owners)
        known_sessions = {n for n in owners.values() if isinstance(n, int)}
        read_sessions = _read_table(db, "sessions", found.sessions, known_sessions)
        read_messages = _read_table(db, "messages", found.messages, known)
        read_preferences = _read_preferences(db, found.preferences)
    # Where pages have changed places, SQLite takes the rows of one table for another's.
    n_rows = len(found.sessions) + len(found.messages)
    found.sessions = {n: row for n, row in found.sessions.items() if not _is_message(row)}
    found.messages = {n: row for n, row in found.messages.items() if not _is_session(row)}
    found.sound = (
        read_sessions
        and read_messages
        and read_preferences
        and complete
        and known == set(found.messages)
        and n_rows == len(found.sessions) + len(found.messages)
    )
    found.n_missing = len(known - set(found.messages))
    return found


def _read_table(db: sqlite3.Connection, table: str, rows: dict[int, Row], known: set[int]) -> bool:
    """Read a table by rowid, around unreadable places; returns whether there were none.

    Args:
        known: rowids that the index tells; a few above the highest one are tried, too.
    """
    columns, complete = _columns(db, table)
    if not columns:
        return False
    query = f"SELECT rowid, {columns} FROM {table} WHERE rowid BETWEEN ? AND ?"
    if _read_range(db, query, "ASC", LEAST_ID, -LEAST_ID - 1, rows):
        return complete
    _read_range(db, query, "DESC", LEAST_ID, -LEAST_ID - 1, rows)
    last = max((number for number in (*rows, *known) if number < LARGEST_ID), default=0)
    ranges = deque([(1, last + BEYOND)])
    for _ in range(MOST_QUERIES):
        if not ranges:
            break
        low, high = ranges.popleft()
        if not _read_range(db, query, "ASC", low, high, rows) and low < high:
            middle = (low + high) // 2
            ranges += [(low, middle), (middle + 1, high)]
    for number in known - set(rows):  # a page in a wrong place ends a range too early
        _read_range(db, query, "ASC", number, number, rows)
    return False


def _columns(db: sqlite3.Connection, table: str) -> tuple[str, bool]:
    """The columns of a table to select, NULL for those that are missing, and whether none is.

    Nothing is selected from a view, which could do anything.
    """
    try:
        kinds = db.execute("SELECT type FROM sqlite_master WHERE name = ?", (table,)).fetchall()
        there = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
    except SQLITE_ERRORS:
        return "", False
    wanted = COLUMNS[table].split(", ")
    if kinds != [("table",)] or not there & set(wanted):
        return "", False
    return ", ".join(c if c in there else f"NULL AS {c}" for c in wanted), there >= set(wanted)


def _read_range(
    db: sqlite3.Connection, query: str, order: str, low: int, high: int, rows: dict[int, Row]
) -> bool:
    """Read a range as far as it goes; returns whether there was no error."""
    # Without a limit SQLite looks for one more row, which can be in an unreadable page.
    most = min(high - low + 1, -LEAST_ID - 1)
    try:
        for rowid, *values in db.execute(
            f"{query} ORDER BY rowid {order} LIMIT ?", (low, high, most)
        ):
            rows.setdefault(rowid, tuple(values))
    except (*SQLITE_ERRORS, OverflowError):
        return False
    return True


def _read_preferences(db: sqlite3.Connection, preferences: dict[str, str]) -> bool:
    columns, complete = _columns(db, "preferences")
    if not complete:
        return False
    try:
        for name, value in db.execute(f"SELECT {columns} FROM preferences"):
            if isinstance(name, str) and isinstance(value, str):
                preferences[name] = value
    except SQLITE_ERRORS:
        return False
    return True


def _indexed(db: sqlite3.Connection) -> tuple[dict[int, Any], bool]:
    """The sessions of the messages that the index knows, and whether that is all.

    It is read from both of its ends.
    """
    owners: dict[int, Any] = {}
    query = "SELECT rowid, session_id FROM messages INDEXED BY messages_of_session"
    for order in ("ASC", "DESC"):
        with suppress(*SQLITE_ERRORS):
            owners.update(db.execute(f"{query} ORDER BY session_id {order}, rowid {order}"))
            return owners, True
    return owners, False


def _is_message(row: Row) -> bool:
    return isinstance(row[1], int) and row[3] in ("user", "assistant") and isinstance(row[4], str)


def _is_session(row: Row) -> bool:
    return all(isinstance(text, str) for text in row[1:5]) and isinstance(row[7], float)


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
        """The session of a message; where that makes no sense, the session of the one before it."""
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
