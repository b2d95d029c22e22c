"""What users keep: who may read it, many chats on one file, and files that are no database."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from localkv.chat import session as session_module
from localkv.chat.session import ChatSession, default_name, export
from localkv.chat.store import DamagedStoreError, SessionGoneError, Store, default_path
from localkv.errors import LocalKVError
from localkv.sampling.params import SamplingParams
from support.program import clean_env

N_FIRST_OPENS = 10
"""Processes that open a file together that is not there."""
N_FIRST_OPENS_LONG = 200
N_WRITERS, N_ROWS = 8, 25

posix = pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")


def mode(path: Path | str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def talk(store: Store, title: str = "A fox", answer: str = "Mia.") -> ChatSession:
    session = ChatSession(store, model="m.gguf", params=SamplingParams())
    session.say(title)
    message = session.begin_answer()
    session.extend(message, answer)
    session.keep(message)
    return session


@pytest.fixture
def loose_umask():
    before = os.umask(0)
    yield
    os.umask(before)


# -- who may read it


@posix
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o277, 0o777])
def test_only_the_owner_may_read_sessions(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "data" / "localkv" / "chats.sqlite3"
    (tmp_path / "data").mkdir()
    before = os.umask(mask)
    try:
        store = Store(path)
    finally:
        os.umask(before)
    talk(store)
    made = {file.name: mode(file) for file in path.parent.iterdir()}
    assert set(made) >= {"chats.sqlite3", "chats.sqlite3-wal", "chats.sqlite3-shm"}
    assert set(made.values()) == {0o600}
    assert mode(path.parent) & 0o077 == 0
    store.close()


@posix
@pytest.mark.usefixtures("loose_umask")
def test_what_was_open_to_others_is_closed_to_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = default_path()
    first = Store(path)  # its log and index stay while it is open
    talk(first)
    path.parent.chmod(0o755)
    for file in path.parent.iterdir():
        file.chmod(0o644)
    Path(f"{path}-journal").write_bytes(b"")
    Path(f"{path}-journal").chmod(0o666)
    second = Store(path)
    assert {mode(file) for file in path.parent.iterdir()} == {0o600}
    assert mode(path.parent) == 0o700
    first.close()
    second.close()


@posix
def test_a_folder_that_holds_other_things_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    Store(shared / "chats").close()
    assert mode(shared) == 0o755
    assert mode(shared / "chats") == 0o600


@posix
def test_a_link_is_followed_and_what_it_names_is_private(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "chats", tmp_path / "far" / "real"
    link.symlink_to(target)
    for _ in range(2):  # made through the link, then found
        store = Store(link)
        talk(store)
        assert {mode(file) for file in target.parent.iterdir()} == {0o600}
        store.close()
    assert list(target.parent.iterdir()) == [target]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(LocalKVError):
        Store(tmp_path / "loop")


@posix
def test_exports_have_the_mode_that_the_umask_says(store: Store, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export(talk(store), tmp_path / "a.md")
    finally:
        os.umask(before)
    assert mode(tmp_path / "a.md") == 0o640


def test_what_is_deleted_is_not_in_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats")
    secret = "xyzzy-plugh " * 2000  # longer than a page
    kept = talk(store, "Kept", "plover")
    gone = talk(store, "Gone", secret)
    for length in (50, 500, 900):  # an answer that grows leaves older ones behind
        gone.conversation.path()[-1].content = secret[: length * 12]
        gone.keep(gone.conversation.path()[-1])
    store.delete_session(gone.id)
    store.close()
    data = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"plover" in data
    assert b"xyzzy" not in data
    assert kept.id is not None


# -- what is no file


@posix
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "link to a folder", "below a file"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "chats"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/null")
    elif kind == "link to a folder":
        path.symlink_to(tmp_path)
    else:
        path.write_text("")
        path = path / "chats"
    with pytest.raises(LocalKVError) as raised:
        Store(path)
    assert "\n" not in str(raised.value)
    assert str(path) in raised.value.message


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "\udc80chats"])
def test_odd_names_are_errors_or_work(tmp_path: Path, name: str) -> None:
    said = ""
    try:
        Store(tmp_path / name).close()
    except LocalKVError as error:
        said = str(error)
    assert said.isprintable()


def test_a_log_without_its_database_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "chats"
    store = Store(path)
    talk(store)
    log = Path(f"{path}-wal").read_bytes()
    store.close()
    for database in (None, b""):
        for file in tmp_path.iterdir():
            file.unlink()
        if database is not None:
            path.write_bytes(database)
        Path(f"{path}-wal").write_bytes(log)
        with pytest.raises(DamagedStoreError, match="its log"):
            Store(path)
        assert Path(f"{path}-wal").read_bytes() == log


# -- many chats on one file

FIRST_OPEN = """
import sys, time
from localkv.chat.store import Store
from localkv.errors import LocalKVError
path, start, number, rows = sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
time.sleep(max(0.0, start - time.time()))
store = Store(path)
session = store.add_session(f"session {number}", "m", "", {})
message = None
for row in range(rows):
    message = store.add_message(session, message and message.id, "user", f"{number}/{row}")
    message.content += "!"
    store.update_message(message)
store.close()
"""


def run_writers(path: Path, n_processes: int, n_rows: int) -> None:
    """Processes that open `path` at the same moment and write; each must succeed."""
    start = time.time() + 0.5 + 0.12 * n_processes
    command = [sys.executable, "-c", FIRST_OPEN, str(path), str(start)]
    running = [
        subprocess.Popen(
            [*command, str(number), str(n_rows)], env=clean_env(), stderr=subprocess.PIPE
        )
        for number in range(n_processes)
    ]
    for process in running:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err.decode()


def check_rows(path: Path, n_processes: int, n_rows: int) -> None:
    with closing(Store(path)) as store:
        found = store.sessions()
        assert sorted(s.title for s in found) == sorted(f"session {n}" for n in range(n_processes))
        for summary in found:
            number = summary.title.removeprefix("session ")
            said = [m.content for m in store.session(summary.id).conversation.path()]
            assert said == [f"{number}/{row}!" for row in range(n_rows)]


@pytest.mark.slow
def test_first_opens_at_the_same_moment(tmp_path: Path) -> None:
    run_writers(tmp_path / "new" / "chats", N_FIRST_OPENS, 3)
    check_rows(tmp_path / "new" / "chats", N_FIRST_OPENS, 3)


@pytest.mark.parametrize("lock", ["SHARED", "IMMEDIATE", "EXCLUSIVE"])
def test_a_first_open_waits_for_another_one(tmp_path: Path, lock: str) -> None:
    """However far the other has come: it only reads, or makes the tables just now."""
    other = sqlite3.connect(tmp_path / "chats", isolation_level=None, check_same_thread=False)
    other.execute("PRAGMA user_version = 0")
    other.execute("BEGIN" if lock == "SHARED" else f"BEGIN {lock}")
    other.execute("SELECT * FROM sqlite_master").fetchall()
    release = threading.Timer(0.5, other.execute, ["ROLLBACK"])
    release.start()
    store = Store(tmp_path / "chats")
    talk(store)
    assert store._db.rows("PRAGMA journal_mode") == [("wal",)]
    release.join()
    other.close()
    store.close()


@pytest.mark.slow
def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    run_writers(tmp_path / "chats", N_WRITERS, N_ROWS)
    check_rows(tmp_path / "chats", N_WRITERS, N_ROWS)


@pytest.mark.attack
def test_first_opens_at_the_same_moment_often(tmp_path: Path) -> None:
    for number in range(N_FIRST_OPENS_LONG // N_FIRST_OPENS):
        run_writers(tmp_path / str(number) / "chats", N_FIRST_OPENS, 4)
        check_rows(tmp_path / str(number) / "chats", N_FIRST_OPENS, 4)


@pytest.mark.attack
def test_many_writers_lose_nothing_often(tmp_path: Path) -> None:
    for number in range(10):
        run_writers(tmp_path / str(number) / "chats", N_WRITERS, 10 * N_ROWS)
        check_rows(tmp_path / str(number) / "chats", N_WRITERS, 10 * N_ROWS)


def test_a_writer_that_does_not_end_is_said(tmp_path, monkeypatch) -> None:
    store = Store(tmp_path / "chats")
    chat = talk(store)
    other = sqlite3.connect(tmp_path / "chats", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    problems: list[LocalKVError] = []
    chat.on_problem = problems.append
    answer = chat.conversation.path()[-1]
    for _ in range(3):
        chat.extend(answer, " More.")
        chat.keep(answer)  # does not wait long: the screen would stand still
    assert [error.message for error in problems] == [
        f"{tmp_path / 'chats'}: another program is writing to it and does not end"
    ]
    other.execute("ROLLBACK")
    other.close()
    monkeypatch.setattr(session_module, "KEEP_PATIENCE", 0.0)
    chat.keep(answer)
    stored = store.session(chat.id).conversation.path()[-1]
    assert stored.content == "Mia. More. More. More."
    store.close()


def test_two_chats_see_each_other(tmp_path: Path) -> None:
    one, two = Store(tmp_path / "chats"), Store(tmp_path / "chats")
    mine, theirs = talk(one, "Mine"), talk(two, "Theirs")
    for store in (one, two):
        assert {s.title for s in store.sessions()} == {"Mine", "Theirs"}
    both = mine.resumed(theirs.id)  # the same session on two screens
    theirs.say("from there")
    both.say("from here")
    texts = {m.content for m in one.session(theirs.id).conversation.messages.values()}
    assert texts == {"Theirs", "Mia.", "from there", "from here"}
    one.close()
    two.close()


def test_a_session_that_another_chat_deleted(tmp_path: Path) -> None:
    one, two = Store(tmp_path / "chats"), Store(tmp_path / "chats")
    chat = talk(one)
    two.delete_session(chat.id)
    with pytest.raises(SessionGoneError, match="another chat has deleted"):
        chat.say("And then?")
    with pytest.raises(SessionGoneError, match="another chat has deleted"):
        chat.keep(chat.conversation.path()[-1])
    assert [m.content for m in chat.conversation.path()] == ["A fox", "Mia."]
    one.close()
    two.close()


def test_an_answer_that_another_chat_goes_on_from_is_not_taken_back(tmp_path: Path) -> None:
    one, two = Store(tmp_path / "chats"), Store(tmp_path / "chats")
    chat = talk(one)
    other = ChatSession(two, model="m", params=SamplingParams()).resumed(chat.id)
    other.say("And then?")
    chat.discard(chat.conversation.path()[-1])
    assert len(two.session(chat.id).conversation.messages) == 3
    one.close()
    two.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_deleted_under_a_chat(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "chats"
    store = Store(path)
    chat = talk(store)
    for file in tmp_path.iterdir():
        file.unlink()
    if replaced:
        Store(path).close()
    with pytest.raises(SessionGoneError, match="was deleted or replaced"):
        chat.say("And then?")
    assert [m.content for m in chat.conversation.path()] == ["A fox", "Mia."]
    store.close()


@pytest.mark.slow
def test_deleting_a_long_session_takes_no_time(store: Store) -> None:
    chats = [talk(store), talk(store)]
    with store._db.change() as db:
        for chat in chats:
            row = (chat.id, None, "user", "x", 1.0)
            columns = "session_id, parent_id, role, content, created"
            insert = f"INSERT INTO messages ({columns}) VALUES (?, ?, ?, ?, ?)"
            db.executemany(insert, [row] * 20_000)
    started = time.monotonic()
    store.delete_session(chats[0].id)
    assert time.monotonic() - started < 10
    assert [s.id for s in store.sessions()] == [chats[1].id]


# -- no room, no rights


def test_a_full_disk_is_told_once_and_made_up_for(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats")
    chat = talk(store)
    problems: list[LocalKVError] = []
    chat.on_problem = problems.append
    answer = chat.conversation.path()[-1]
    (n_pages,) = store._db.rows("PRAGMA page_count")[0]
    store._db.rows(f"PRAGMA max_page_count = {n_pages}")
    for _ in range(5):
        chat.extend(answer, "more " * 3000)
        chat.keep(answer)
    with pytest.raises(LocalKVError, match="no room on the disk"):
        chat.say("more " * 3000)
    assert [error.message for error in problems] == [f"{tmp_path / 'chats'}: no room on the disk"]
    store._db.rows("PRAGMA max_page_count = 100000")
    chat.say("And then?")  # there is room again: the answer is written, too
    said = [m.content for m in store.session(chat.id).conversation.path()]
    assert said == ["A fox", answer.content, "And then?"]
    store.close()


@pytest.mark.parametrize(
    "text", ["\ud800 half", "\ud83d\ude00 both halves", "a\0b", "x" * 2_000_000]
)
def test_any_text_can_be_stored(store: Store, text: str) -> None:
    chat = talk(store, text or "x", text)
    chat.rename(text)
    stored = store.session(chat.id)
    expected = text.replace("\ud800", "\ufffd").replace("\ud83d\ude00", "\U0001f600")
    assert {m.content for m in stored.conversation.path()} == {expected}
    if len(text) > 50_000:
        with pytest.raises(LocalKVError, match="too complex"):
            store.sessions(text)
    else:
        assert [s.id for s in store.sessions(text)] == [chat.id]
    store.set_preference("theme", text)
    assert len(default_name(text, "md").encode()) <= 110


def test_a_future_file_is_left_alone(tmp_path: Path) -> None:
    Store(tmp_path / "chats").close()
    with closing(sqlite3.connect(tmp_path / "chats")) as db:
        db.execute("PRAGMA user_version = 7")
        db.execute("ALTER TABLE sessions ADD COLUMN folder TEXT")
    before = (tmp_path / "chats").read_bytes()
    with pytest.raises(LocalKVError, match="made by a newer localkv"):
        Store(tmp_path / "chats")
    assert (tmp_path / "chats").read_bytes() == before
