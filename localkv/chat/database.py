"""`Database`: a connection to the file of sessions, which other chats may have open, too.

All that can go wrong with the file leaves here as one line.
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

from localkv.chat.private_file import make_private
from localkv.chat.schema import SCHEMA_VERSION, SQLITE_ERRORS, damage_of, migrate, version_of
from localkv.errors import LocalKVError, printable

PATIENCE = 10.0
"""Seconds to wait for another chat that is writing."""
IN_MEMORY = ":memory:"


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
