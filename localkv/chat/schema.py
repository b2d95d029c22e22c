"""The tables of the file of sessions, and how older files get to them."""

from __future__ import annotations

import sqlite3

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
