"""`Database`: a connection to the file of sessions, which other chats may have open, too.

The file is private, has the tables below, and is brought to their newest version when it is opened.
All that can go wrong with it leaves here as one line.
"""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from localkv.errors import LocalKVError, printable

PATIENCE = 10.0
"""Seconds to wait for another chat that is writing."""
IN_MEMORY = ":memory:"
SIDECARS = ("-wal", "-shm", "-journal")
"""Endings of SQLite's files beside a database, while it is open and after a crash."""


def make_private(path: Path, *, own_folder: bool) -> None:
    """Make a file and its folder where there are none, and keep others out of both.

    A folder that is made is private. An existing one is left alone unless it is localkv's own,
    since it may hold shared files.

    Args:
        path: the file, without symbolic links.
        own_folder: whether the folder holds only localkv's files.

    Raises:
        OSError: it is not a file, or can't be made.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if own_folder:
        tighten(path.parent)
    with suppress(FileExistsError):
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            if os.name == "posix":
                os.fchmod(handle, 0o600)  # despite the umask
        finally:
            os.close(handle)
    # It is not opened here: closing it would take the locks that SQLite holds in this process.
    for file in (path, *(Path(f"{path}{suffix}") for suffix in SIDECARS)):
        if file.is_file():
            tighten(file)


def is_private(path: Path) -> bool:
    """Whether others can't read or write a file or folder."""
    return os.name != "posix" or not path.stat().st_mode & 0o077


def tighten(path: Path) -> None:
    """Take all rights from others, if it is the user's."""
    with suppress(OSError):  # it has just gone, or its file system has no modes
        info = path.stat()
        if os.name == "posix" and info.st_uid == os.geteuid() and not is_private(path):
            path.chmod(stat.S_IMODE(info.st_mode) & 0o700)


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

COLUMNS = {
    "sessions": "id, title, model, system_prompt, settings, leaf_id, dropped_id, created, updated",
    "messages": "id, session_id, parent_id, role, content, finish_reason, stats, error, created",
    "preferences": "name, value",
}
"""The columns of each table, in the order in which a row holds them."""
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Errors of SQLite's module; the latter if a message of SQLite quotes damaged text."""


def version_of(db: sqlite3.Connection) -> int:
    """The version of a file's schema; 0 of a file that was just made."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return int(version)


def migrate(db: sqlite3.Connection) -> None:
    """Bring a file to the newest version. The caller holds the lock of writers."""
    for number, script in enumerate(_MIGRATIONS[version_of(db) :], version_of(db) + 1):
        for statement in script.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {number}")


def has_tables(db: sqlite3.Connection) -> bool:
    """Whether all tables are there, and are tables, and have all columns.

    Raises:
        sqlite3.Error: a column is missing, or the list of tables can't be read.
    """
    found = set(db.execute("SELECT type, name FROM sqlite_master"))
    if not all(("table", name) in found for name in COLUMNS):
        return False
    for table, columns in COLUMNS.items():
        db.execute(f"SELECT {columns} FROM {table} LIMIT 0")
    return True


def damage_of(db: sqlite3.Connection) -> str | None:
    """The error in the file's layout, or None. Values are not checked.

    Raises:
        sqlite3.Error: a column is missing, or the file can't be read at all.
    """
    if not has_tables(db):
        return "a table is missing"
    others = db.execute("SELECT type, name FROM sqlite_master WHERE type != 'table'").fetchall()
    if ("index", "messages_of_session") not in others:
        return "an index is missing"
    if any(kind == "trigger" for kind, _ in others):
        return "it does something by itself when it is written to"
    found = [line for (text,) in db.execute("PRAGMA quick_check(1)") for line in text.splitlines()]
    wrong = [line for line in found if line != "ok" and not line.startswith("***")]
    return wrong[0] if wrong else None


class DamagedStoreError(LocalKVError):
    """The stored data can't be read as it is; `localkv chat --repair` saves what it can."""


class SessionGoneError(LocalKVError):
    """Another chat has deleted the session, or the file."""


def default_path() -> Path:
    """Where sessions are kept: the platform's data folder (~/.local/share/localkv on Linux)."""
    from platformdirs import user_data_path

    return user_data_path("localkv", appauthor=False) / "chats.sqlite3"


def damaged(path: str | Path, what: str) -> DamagedStoreError:
    """The error that names the damage, and the remedy."""
    named = "" if Path(path) == default_path() else f" --sessions {printable(path)}"
    return DamagedStoreError(
        f"{printable(path)}: {_short(what)}",
        hint=f"localkv chat --repair{named} saves everything that can be read, and "
        "keeps the damaged file",
    )


def _short(what: str) -> str:
    """A message of SQLite, which may quote the file, in one line."""
    text = " ".join(what.split())[:200]
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


class Database:
    """One connection; the file is made where there is none, and only its owner may read it.

    Args:
        path: the file, or ":memory:".

    Raises:
        DamagedStoreError: the file is damaged.
        LocalKVError: it can't be used, or a newer localkv made it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        with self._errors():
            self._file = None if path == IN_MEMORY else _real(path)
            if self._file is not None:
                _check_kind(self._file)
                self._check_log(self._file)
                own_folder = self._file.parent == Path(os.path.realpath(default_path().parent))
                make_private(self._file, own_folder=own_folder)
            self._db = sqlite3.connect(
                self._file or IN_MEMORY, timeout=PATIENCE, isolation_level=None
            )
            # a character that is damaged is shown as one; the rest of the text is fine
            self._db.text_factory = lambda raw: raw.decode(errors="replace")
            try:
                self._set_up()
                self._identity = self._identify()
            except BaseException:
                self.close()
                raise

    def _check_log(self, file: Path) -> None:
        """SQLite would delete the log of a database that is empty; there may be chats in it."""
        with suppress(FileNotFoundError):
            if not os.stat(f"{file}-wal").st_size:
                return
            if not file.exists() or not file.stat().st_size:
                what = "empty" if file.exists() else "missing"
                raise damaged(self.path, f"it is {what}, but its log (-wal) is there")

    def _set_up(self) -> None:
        """Prepare the file. SQLite doesn't wait by itself in every step of that."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self._prepare()
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:
                    raise damaged(self.path, f"the database is damaged: {error}") from error
                if not _is_busy(error) or time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(0.005, 0.05))

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA secure_delete = ON")  # deleted rows are overwritten
        with self._transaction():
            version = version_of(self._db)
            if version > SCHEMA_VERSION:
                raise LocalKVError(
                    f"{printable(self.path)}: made by a newer localkv (version {version})",
                    hint="--sessions names another file; if no newer one was used, --repair helps",
                )
            migrate(self._db)
        if what := damage_of(self._db):
            raise damaged(self.path, f"the database is damaged: {what}")

    def _identify(self) -> tuple[int, int] | None:
        if self._file is None:
            return None
        info = self._file.stat()
        return info.st_dev, info.st_ino

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query. Raises DamagedStoreError, LocalKVError."""
        with self._errors():
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def change(
        self, patience: float = PATIENCE, *, foreign_keys: bool = True
    ) -> Iterator[sqlite3.Connection]:
        """One transaction, which nobody else's interrupts.

        Args:
            patience: seconds to wait for another chat that is writing.
            foreign_keys: SQLite checks them; for each deleted message it searches all
                messages for those that follow it.

        Raises:
            SessionGoneError: the file was deleted or replaced, so that nobody would find the
                changes.
            DamagedStoreError, LocalKVError: it can't be written.
        """
        with self._errors():
            if self._identity is not None and self._identity != self._still_there():
                raise SessionGoneError(
                    f"{printable(self.path)} was deleted or replaced while it was open: "
                    "nothing is stored any more",
                    hint="/export keeps this conversation; then start the chat again",
                )
            self._db.execute(f"PRAGMA busy_timeout = {round(patience * 1000)}")
            self._db.execute(f"PRAGMA foreign_keys = {foreign_keys}")
            with self._transaction():
                yield self._db

    def _still_there(self) -> tuple[int, int] | None:
        try:
            return self._identify()
        except OSError:
            return None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, *SQLITE_ERRORS, OverflowError) as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> LocalKVError:
        if isinstance(error, UnicodeDecodeError):
            return damaged(self.path, error.object.decode(errors="replace"))
        where, other = printable(self.path), "--sessions names another file"
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        incomplete = code == sqlite3.SQLITE_ERROR and str(error).startswith("no such")
        if incomplete or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return damaged(self.path, str(error))
        if _is_busy(error):
            return LocalKVError(
                f"{where}: another program is writing to it and does not end",
                hint="is a chat stopped (Ctrl+Z) on another terminal?",
            )
        if code == sqlite3.SQLITE_FULL:
            return LocalKVError(
                f"{where}: no room on the disk", hint="the text on the screen is not stored yet"
            )
        if isinstance(error, OSError):
            return LocalKVError(f"{where}: {error.strerror or error}", hint=other)
        return LocalKVError(f"{where}: {_short(str(error))}", hint=other)

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._db.close()


def _is_busy(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


def _real(path: str | Path) -> Path:
    """The file itself, not a link to it."""
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:  # NUL in it
        raise OSError(None, str(error)) from None


def _check_kind(file: Path) -> None:
    """A pipe would be waited for, and a device written to."""
    with suppress(FileNotFoundError):
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "folder" if stat.S_ISDIR(mode) else "pipe, socket or device"
            raise OSError(None, f"unable to open: it is a {kind}")
