"""`repair`: a new file of sessions from everything that can be read in a damaged one.

The damaged file is only read, and in the end renamed. All work is done on copies in a folder beside
it, which is removed.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from localkv.chat.database import Database, default_path
from localkv.chat.mend import Mended, mend
from localkv.chat.private_file import SIDECARS, tighten
from localkv.chat.salvage import Salvaged, salvage
from localkv.chat.schema import (
    COLUMNS,
    SCHEMA_VERSION,
    SQLITE_ERRORS,
    damage_of,
    has_tables,
    version_of,
)
from localkv.chat.sqlite_pages import MAGIC, apply_log, make_readable, read_log, transplant
from localkv.chat.store import Store
from localkv.errors import LocalKVError, printable

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
    """Make a file of sessions anew from everything readable, and keep the damaged one beside it.

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
    sound = _is_sound(_copied(file, source, folder / "whole"))
    copy = _copied(file, source, folder / "copy")
    found = _salvaged(copy, folder)
    mended = mend(found)
    counts = len(mended.sessions), len(mended.messages), mended.n_changed, mended.n_lost
    if sound and found.sound and not mended.n_changed and not mended.n_lost:
        return Repaired(None, *counts)
    if not any((mended.sessions, mended.messages, mended.preferences)):
        _check_ours(file, folder / "whole")
    new = folder / "new"
    _write(new, mended)
    kept = _set_aside(file)
    if file.exists():
        raise LocalKVError(
            f"{printable(file)} was made anew meanwhile; the damaged one is {printable(kept)}",
            hint="end all chats, and repair that one with --sessions",
        )
    new.rename(file)
    return Repaired(kept, *counts)


def _copied(file: Path, source: BinaryIO | None, copy: Path) -> Path:
    """A copy of the database and of the files that SQLite would read with it."""
    with copy.open("wb") as target:
        if source is not None:
            source.seek(0)
            shutil.copyfileobj(source, target)
    for suffix in ("-wal", "-journal"):
        with suppress(FileNotFoundError):
            shutil.copyfile(f"{file}{suffix}", f"{copy}{suffix}")
    return copy


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


def _salvaged(copy: Path, folder: Path) -> Salvaged:
    """The readable rows of a copy, which is changed so that more of it can be read."""
    if Path(f"{copy}-journal").exists():  # SQLite takes back unfinished changes
        with suppress(*SQLITE_ERRORS), closing(sqlite3.connect(copy)) as db:
            damage_of(db)
    wal = Path(f"{copy}-wal")
    log = read_log(wal.read_bytes() if wal.exists() else b"")
    wal.unlink(missing_ok=True)
    apply_log(copy, log)
    make_readable(copy)
    if not _has_tables(copy):
        Store(folder / "empty").close()
        transplant(copy, folder / "empty")
    return salvage(copy, log)


def _has_tables(copy: Path) -> bool:
    try:
        with closing(sqlite3.connect(f"{copy.as_uri()}?immutable=1", uri=True)) as db:
            return has_tables(db)
    except SQLITE_ERRORS:
        return False


def _check_ours(file: Path, copy: Path) -> None:
    """Not to take somebody's letters for a damaged database."""
    with copy.open("rb") as start:
        ours = start.read(len(MAGIC)) == MAGIC
    if ours or file == Path(os.path.realpath(default_path())):
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
