"""Files of sessions, and ways to damage them: in their bytes, and in their values."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from localkv.chat.engine import Finished
from localkv.chat.session import ChatSession
from localkv.chat.store import Store
from localkv.sampling.params import SamplingParams

PAGE = 4096
INNER_PAGE = 5
"""The first byte of a page that leads to other pages of a table."""
DONE = Finished("stop", 5, 7, 3, 0.1, 0.2, 35.0, 42)

Told = dict[str, list[str]]
"""Title -> what is shown of a session."""


def write_chats(path: Path, n_sessions: int = 12) -> Told:
    """A file of sessions; every text says everywhere whose it is ("s3.") and is unlike others."""
    dice = random.Random(n_sessions)
    told: Told = {}
    with closing(Store(path)) as store:
        for number in range(n_sessions):
            params = SamplingParams(temperature=0.1 * (number + 1), logit_bias={3: -1.0})
            chat = ChatSession(store, model="m.gguf", params=params, system_prompt=f"s{number}.")
            for turn in range(dice.randrange(1, 9)):
                chat.say(f"s{number}.t{turn}. " * dice.choice([1, 5, 40, 900]))
                answer = chat.begin_answer()
                for _ in range(dice.randrange(1, 4)):
                    chat.extend(answer, f"s{number}.a{turn}. " * dice.choice([1, 20, 300, 2000]))
                    chat.keep(answer)
                chat.finish(answer, DONE)
                if dice.random() < 0.3:
                    chat.retry(answer)
                    again = chat.begin_answer()
                    chat.extend(again, f"s{number}.b{turn}. ")
                    chat.finish(again, DONE)
            chat.rename(f"s{number}. {chat.title[:20]}")
            told[chat.title] = shown(chat)
        gone = ChatSession(store, model="m.gguf", params=SamplingParams())
        gone.say("gone. " * 5000)
        store.delete_session(gone.id)
        store.set_preference("theme", "localkv-dark")
    return told


def shown(chat: ChatSession) -> list[str]:
    return [message.content for message in chat.conversation.path()]


def untouched(told: Told, before: bytes, after: bytes) -> Told:
    """The sessions that SQLite can still read whole.

    Nothing of them lies in a page that has changed, and the pages that lead to theirs are as they
    were: the first one, which lists the tables, and the inner pages of tables.
    """
    changed = b""
    for at in range(0, len(before), PAGE):
        page = before[at : at + PAGE]
        if page != after[at : at + PAGE]:
            if at == 0 or page[0] == INNER_PAGE:
                return {}
            changed += page
    return {t: said for t, said in told.items() if t.split()[0].encode() not in changed}


# -- bytes

Damage = Callable[[bytearray, random.Random], None]


def _page(data: bytearray, dice: random.Random) -> int:
    return dice.randrange(len(data) // PAGE) * PAGE


def one_bit(data: bytearray, dice: random.Random) -> None:
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def some_bytes(data: bytearray, dice: random.Random) -> None:
    for _ in range(dice.randrange(1, 40)):
        data[dice.randrange(len(data))] = dice.randrange(256)


def bytes_of_headers(data: bytearray, dice: random.Random) -> None:
    """Where it hurts: types, counts and pointers at the start of pages."""
    for _ in range(dice.randrange(1, 6)):
        data[_page(data, dice) + dice.randrange(24)] = dice.randrange(256)


def first_bytes(data: bytearray, dice: random.Random) -> None:
    """The header of the file, and the list of its tables at the end of the first page."""
    for _ in range(dice.randrange(1, 8)):
        at = dice.choice([dice.randrange(112), dice.randrange(PAGE - 1200, PAGE)])
        data[at] = dice.randrange(256)


def zeroed_pages(data: bytearray, dice: random.Random) -> None:
    for _ in range(dice.randrange(1, 4)):
        at = _page(data, dice)
        data[at : at + PAGE] = bytes(PAGE)


def noise_pages(data: bytearray, dice: random.Random) -> None:
    at = _page(data, dice)
    data[at : at + PAGE] = dice.randbytes(PAGE)


def swapped_pages(data: bytearray, dice: random.Random) -> None:
    one, two = _page(data, dice), _page(data, dice)
    data[one : one + PAGE], data[two : two + PAGE] = data[two : two + PAGE], data[one : one + PAGE]


def doubled_page(data: bytearray, dice: random.Random) -> None:
    one, two = _page(data, dice), _page(data, dice)
    data[one : one + PAGE] = data[two : two + PAGE]


def cut_off(data: bytearray, dice: random.Random) -> None:
    del data[dice.randrange(len(data)) :]


def cut_at_a_page(data: bytearray, dice: random.Random) -> None:
    del data[_page(data, dice) :]


def cut_out(data: bytearray, dice: random.Random) -> None:
    """Everything after it is at the wrong place."""
    at = dice.randrange(len(data))
    del data[at : at + dice.randrange(1, 3000)]


def appended(data: bytearray, dice: random.Random) -> None:
    data += dice.randbytes(dice.randrange(1, 3 * PAGE))


def roots(data: bytearray, dice: random.Random) -> None:
    """The pages that all searches begin with."""
    at = dice.randrange(5) * PAGE
    data[at : at + PAGE] = dice.choice([bytes(PAGE), dice.randbytes(PAGE)])


BYTE_DAMAGES: list[Damage] = [
    one_bit,
    some_bytes,
    bytes_of_headers,
    first_bytes,
    zeroed_pages,
    noise_pages,
    swapped_pages,
    doubled_page,
    cut_off,
    cut_at_a_page,
    cut_out,
    appended,
    roots,
]

# -- values

WRONG = (
    None,
    0,
    -1,
    1 << 62,
    -(1 << 63),
    3.5,
    float("inf"),
    -1e300,
    "",
    "text",
    "[]",
    "{",
    "null",
    '{"a": 1}',
    '{"temperature": "hot"}',
    '{"max_tokens": -5}',
    '{"logit_bias": [1]}',
    '{"logit_bias": {"x": 1}}',
    '{"samplers": ["none"]}',
    '{"top_k": 1e400}',
    '{"seed": ' + "9" * 5000 + "}",
    "[" * 100_000,
    '{"finish_reason": 5}',
    '{"finish_reason": "stop", "prompt_tokens": NaN}',
    "\x1b]52;c;YQ==\x07[b]x[/]\n" * 30,
    "a\0b",
    b"\xff\xfe",
    b"\x00" * 20_000,
)

COLUMNS = {
    "sessions": [
        *("title", "model", "system_prompt", "settings"),
        *("leaf_id", "dropped_id", "created", "updated"),
    ],
    "messages": [
        *("session_id", "parent_id", "role", "content"),
        *("finish_reason", "stats", "error", "created"),
    ],
    "preferences": ["value"],
}


def loosen(db: sqlite3.Connection) -> None:
    """Let columns hold anything, as damaged bytes can say anything."""
    db.execute("PRAGMA foreign_keys = OFF")
    db.execute("PRAGMA writable_schema = ON")
    db.execute(
        "UPDATE sqlite_master SET sql = replace(replace(sql, ' NOT NULL', ''), ' REAL', '') "
        "WHERE type = 'table'"
    )
    db.execute("PRAGMA writable_schema = OFF")


def tighten(db: sqlite3.Connection) -> None:
    """Put the schema back as it was."""
    with closing(Store(":memory:")) as model:
        sound = model._db.rows("SELECT sql, name FROM sqlite_master WHERE type = 'table'")
    db.execute("PRAGMA writable_schema = ON")
    db.executemany("UPDATE sqlite_master SET sql = ? WHERE name = ?", sound)
    db.execute("PRAGMA writable_schema = OFF")


def wrong_value(path: Path, table: str, column: str, value: object, *, all_rows: bool) -> None:
    """Put a value where it makes no sense: in one row, or in all."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        loosen(db)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        key = "name" if table == "preferences" else "id"
        where = "1" if all_rows else f"{key} = (SELECT MAX({key}) FROM {table})"
        db.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (value,))
        tighten(db)


SCRIPTS = {
    "a cycle of two": "UPDATE messages SET parent_id = 2 WHERE id = 1;",
    "its own parent": "UPDATE messages SET parent_id = id;",
    "a cycle of all": "UPDATE messages SET parent_id = id + 1;"
    "UPDATE messages SET parent_id = 1 WHERE id = (SELECT MAX(id) FROM messages);",
    "a parent in another session": "UPDATE messages SET parent_id = (SELECT MAX(id) FROM messages)"
    " WHERE session_id = 1;",
    "no such parent": "UPDATE messages SET parent_id = 999999 WHERE id % 3 = 0;",
    "orphans": "DELETE FROM sessions WHERE id % 2 = 0;",
    "messages missing": "DELETE FROM messages WHERE id % 4 = 1;",
    "no session": "DELETE FROM sessions;",
    "leaf elsewhere": "UPDATE sessions SET leaf_id = 1, dropped_id = 1;",
    "no index": "DROP INDEX messages_of_session;",
    "no sessions": "DROP TABLE sessions;",
    "no messages": "DROP TABLE messages;",
    "no preferences": "DROP TABLE preferences;",
    "a column less": "ALTER TABLE messages DROP COLUMN error;",
    "a column renamed": "ALTER TABLE sessions RENAME COLUMN settings TO choices;",
    "a view for a table": "ALTER TABLE messages RENAME TO m;"
    "CREATE VIEW messages AS SELECT * FROM m;",
    "a view without end": "ALTER TABLE messages RENAME TO m;"
    "CREATE VIEW messages AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) "
    "SELECT id, 1 AS session_id, NULL AS parent_id, 'user' AS role, 'x' AS content, "
    "NULL AS finish_reason, NULL AS stats, NULL AS error, 1.0 AS created FROM n;",
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON messages BEGIN DELETE FROM messages; END;",
    "version 0": "PRAGMA user_version = 0;",
    "version -5": "PRAGMA user_version = -5;",
    "version 3": "PRAGMA user_version = 3;",
    "version 2^30": "PRAGMA user_version = 1073741824;",
    "the largest id": "INSERT INTO messages (id, session_id, role, content, created) VALUES "
    "(9223372036854775807, 1, 'user', 'last', 1.0);",
    "the least id": "INSERT INTO messages (id, session_id, role, content, created) VALUES "
    "(-9223372036854775808, 1, 'user', 'first', 1.0);",
    "another encoding": "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'CREATE';",
    "a chain of 10,000": "DELETE FROM messages; WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT "
    "i + 1 FROM n WHERE i < 10000) INSERT INTO messages SELECT i, 1, nullif(i - 1, 0), 'user', "
    "'x', NULL, NULL, NULL, 1.0 FROM n;",
}


def run_script(path: Path, name: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.executescript(SCRIPTS[name])
