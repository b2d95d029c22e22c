"""`salvage`: the rows that can be read in a damaged file of sessions.

Three ways, one after the other. SQLite reads rows in order, from both ends and, where a page can't
be read, in ever smaller ranges around it. The index tells which messages there were. Where SQLite
met damage, the file's pages are searched for more rows.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localkv.chat.schema import COLUMNS, SQLITE_ERRORS
from localkv.chat.sqlite_pages import Log, free_pages, leaf_rows, split_pages

LARGEST_ID = 1 << 40
LEAST_ID = -(1 << 63)
MOST_QUERIES = 20_000
"""On one table, around unreadable places, before the rest is given up."""
BEYOND = 1000
"""Rowids that are tried above the highest one that is known."""

Row = tuple[Any, ...]

_SESSION, _CREATED = 1, {"sessions": 7, "messages": 8}
_N_COLUMNS = len(COLUMNS["messages"].split(", "))


class Rows(dict[int, Row]):
    """Rows of a table by id, values in the order of `COLUMNS`.

    If two rows have the same id, their creation times show whether they are two versions of one
    row; then the longer one counts. Otherwise the other is kept under an id below all others.
    """

    def __init__(self, table: str) -> None:
        super().__init__()
        self.table = table
        self.owners: dict[int, int] = {}

    def add(self, rowid: int, row: Row) -> None:
        """Take a row that was found, perhaps not for the first time."""
        other = self.setdefault(rowid, row)
        if other == row or row in (self[key] for key in self if key < LEAST_ID):
            return
        if other[_CREATED[self.table]] == row[_CREATED[self.table]]:
            self[rowid] = max(other, row, key=lambda row: len(str(row)))
            return
        if self.owners.get(rowid) == row[_SESSION]:  # the index knows it
            self[rowid], row = row, other
        self[LEAST_ID - 1 - len(self)] = row


@dataclass
class Salvaged:
    """The rows that were found.

    Attributes:
        sessions, messages: the rows.
        preferences: by name.
        n_missing: messages that the index knows and nobody has found.
        sound: SQLite has read all of it without an error.
    """

    sessions: Rows = field(default_factory=lambda: Rows("sessions"))
    messages: Rows = field(default_factory=lambda: Rows("messages"))
    preferences: dict[str, str] = field(default_factory=dict)
    n_missing: int = 0
    sound: bool = True


def salvage(file: Path, log: Log) -> Salvaged:
    """Read a file in which nothing more is written.

    Args:
        file: a database, with the committed part of its log.
        log: where to look for pages besides.
    """
    found = Salvaged()
    with closing(sqlite3.connect(f"{file.as_uri()}?immutable=1", uri=True)) as db:
        db.text_factory = lambda raw: raw.decode(errors="replace")
        known, complete = _indexed(db)
        found.messages.owners = known
        found.sound &= _read_table(db, found.sessions, 0)
        found.sound &= _read_table(db, found.messages, max(known, default=0))
        found.sound &= _read_preferences(db, found.preferences)
        found.sound &= complete and set(known) == set(found.messages)
    if not found.sound:
        _search_pages(file.read_bytes(), log, found)
    found.n_missing = len(set(known) - set(found.messages))
    return found


def _read_table(db: sqlite3.Connection, rows: Rows, last: int) -> bool:
    """Read a table by rowid, around unreadable places; returns whether there were none.

    Args:
        last: the highest rowid that is known of; a few more are tried.
    """
    columns = COLUMNS[rows.table]
    query = f"SELECT rowid, {columns} FROM {rows.table} WHERE rowid BETWEEN ? AND ?"
    low, sound = _read_range(db, query, "ASC", -(1 << 63), (1 << 63) - 1, rows)
    if sound:
        return True
    high, _ = _read_range(db, query, "DESC", low, (1 << 63) - 1, rows)
    low = max(low, 1)
    ranges = deque([(low, min(high, max(low, last) + BEYOND))])
    for _ in range(MOST_QUERIES):
        if not ranges:
            break
        low, high = ranges.popleft()
        low, sound = _read_range(db, query, "ASC", low, high, rows)
        if sound:
            continue
        high, _ = _read_range(db, query, "DESC", low, high, rows)
        if low < high:
            middle = (low + high) // 2
            ranges += [(low, middle), (middle + 1, high)]
    return False


def _read_range(
    db: sqlite3.Connection, query: str, order: str, low: int, high: int, rows: Rows
) -> tuple[int, bool]:
    """Read a range as far as it goes: where it ended, and whether there was no error."""
    step, at = (1, low) if order == "ASC" else (-1, high)
    try:
        for rowid, *values in db.execute(f"{query} ORDER BY rowid {order}", (low, high)):
            rows.add(rowid, tuple(values))
            at = rowid + step
    except (*SQLITE_ERRORS, OverflowError):
        return at, False
    return at, True


def _read_preferences(db: sqlite3.Connection, preferences: dict[str, str]) -> bool:
    try:
        for name, value in db.execute("SELECT name, value FROM preferences"):
            if isinstance(name, str) and isinstance(value, str):
                preferences[name] = value
    except SQLITE_ERRORS:
        return False
    return True


def _indexed(db: sqlite3.Connection) -> tuple[dict[int, int], bool]:
    """The messages that the index knows, each with its session, and whether that is all.

    It is read from both of its ends.
    """
    owners: dict[int, int] = {}
    query = "SELECT session_id, rowid FROM messages INDEXED BY messages_of_session"
    for order in ("ASC", "DESC"):
        with suppress(*SQLITE_ERRORS):
            for session_id, rowid in db.execute(
                f"{query} ORDER BY session_id {order}, rowid {order}"
            ):
                owners[rowid] = session_id
            return owners, True
    return owners, False


def _search_pages(data: bytes, log: Log, found: Salvaged) -> None:
    """Add rows that only the pages themselves show."""
    free = free_pages(data)
    pages = [page for number, page in enumerate(split_pages(data), 1) if number not in free]
    pages += [page for _, page in log.loose]
    # SQLite may have taken one table for the other
    _remove(found.sessions, _is_message)
    _remove(found.messages, _is_session)
    for rowid, values in leaf_rows(data, pages):
        if 0 < rowid < LARGEST_ID and len(values) == _N_COLUMNS and values[0] is None:
            row = (rowid, *values[1:])
            if _is_message(row):
                found.messages.add(rowid, row)
            elif _is_session(row):
                found.sessions.add(rowid, row)


def _remove(rows: Rows, wrong: Callable[[Row], bool]) -> None:
    for number in [number for number, row in rows.items() if wrong(row)]:
        del rows[number]


def _is_message(row: Row) -> bool:
    return isinstance(row[1], int) and row[3] in ("user", "assistant") and isinstance(row[4], str)


def _is_session(row: Row) -> bool:
    return all(isinstance(text, str) for text in row[1:5]) and isinstance(row[7], float)
