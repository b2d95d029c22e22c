"""Damaged files of sessions: each use is right or one line of error, and repair saves the rest."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from localkv.chat.repair import repair
from localkv.chat.session import ChatSession, to_json, to_markdown
from localkv.chat.store import DamagedStoreError, Store
from localkv.errors import LocalKVError
from localkv.sampling.params import SamplingParams
from support.attack.damaged_chats import (
    BYTE_DAMAGES,
    COLUMNS,
    SCRIPTS,
    WRONG,
    Damage,
    Told,
    run_script,
    shown,
    untouched,
    write_chats,
    wrong_value,
)

N_SEEDS = 3
"""Seeds of each way to damage bytes."""
N_SEEDS_LONG = 200
MOSTLY_HARMLESS = ("one_bit", "some_bytes", "appended")
N_VALUES = 21
"""The fast part tries one of this many wrong values."""


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Told]:
    path = tmp_path_factory.mktemp("chats") / "chats"
    return path, write_chats(path)


@pytest.fixture
def copy(chats: tuple[Path, Told], tmp_path: Path) -> Path:
    return Path(shutil.copy(chats[0], tmp_path / "chats"))


def use(path: Path) -> list[str]:
    """Do all that a chat does with its file; what went wrong, each a line."""
    errors = _use(path)
    assert all(error.isprintable() for error in errors), errors
    return errors


def _use(path: Path) -> list[str]:
    errors: list[str] = []

    def attempt(what) -> None:
        try:
            what()
        except LocalKVError as error:
            errors.append(error.message)

    def resume(number: int) -> None:
        chat = ChatSession(store, model="m", params=SamplingParams()).resumed(number)
        chat.request()
        to_markdown(chat)
        to_json(chat)
        for message in list(chat.conversation.messages.values())[:3]:
            chat.conversation.branches(message)
            chat.conversation.show_branch(message)
        chat.say("And then?")
        answer = chat.begin_answer()
        chat.extend(answer, "Nothing.")
        chat.keep(answer)

    try:
        store = Store(path)
    except LocalKVError as error:
        return [error.message]
    with closing(store):
        attempt(store.prompts)
        attempt(lambda: store.preference("theme"))
        attempt(lambda: store.sessions("s3. nothing"))
        listed = []
        attempt(lambda: listed.extend(store.sessions()))
        for session in listed:
            attempt(lambda number=session.id: resume(number))
        attempt(lambda: store.set_preference("theme", "x"))
    return errors


def contents(path: Path) -> Told:
    with closing(Store(path)) as store:
        chat = ChatSession(store, model="m", params=SamplingParams())
        return {s.title: shown(chat.resumed(s.id)) for s in store.sessions()}


def check_repaired(path: Path, kept: Told) -> str:
    """Repair, look that these sessions are there, and that all can be used; what it did."""
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    done = repair(path)
    after = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert all(data in after.values() for data in before.values())  # nothing is gone
    if done.kept is not None:
        assert done.kept.read_bytes() == before[path.name]
    now = contents(path)
    for title, said in kept.items():
        assert now.get(title) == said, title
    assert not any("gone." in text for said in now.values() for text in said)
    assert use(path) == []
    assert repair(path).kept is None
    return "sound" if done.kept is None else "damaged"


def check_bytes(original: Path, told: Told, path: Path, damage: Damage, seed: int) -> str:
    """One damage; what came of it."""
    dice = random.Random(f"{damage.__name__}{seed}")
    before = original.read_bytes()
    after = bytearray(before)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        if len(after) >= 4096:
            damage(after, dice)
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    path.write_bytes(after)
    other = path.with_name("other")
    shutil.copy(path, other)
    errors = use(other)
    for file in path.parent.glob("other*"):
        file.unlink()
    if not after and not errors:
        return "empty"  # which is how a new one begins
    if after and after[:16] != before[:16]:
        with pytest.raises(LocalKVError, match="nothing in it that could be saved"):
            repair(path)
        assert path.read_bytes() == after
        return "no database to SQLite, errors in use"
    did = check_repaired(path, untouched(told, before, bytes(after)))
    assert not (errors and did == "sound"), errors
    return f"{did}, {'errors' if errors else 'no error'} in use"


@pytest.mark.parametrize("damage", BYTE_DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_bytes(chats: tuple[Path, Told], tmp_path: Path, damage: Damage) -> None:
    seen = Counter(check_bytes(*chats, tmp_path / "chats", damage, n) for n in range(N_SEEDS))
    assert seen["damaged, errors in use"] or damage.__name__ in MOSTLY_HARMLESS, seen


@pytest.mark.attack
@pytest.mark.parametrize("damage", BYTE_DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_bytes_often(chats, tmp_path: Path, damage: Damage, summary) -> None:
    seeds = range(N_SEEDS, N_SEEDS_LONG)
    seen = Counter(check_bytes(*chats, tmp_path / "chats", damage, n) for n in seeds)
    summary(f"chats, {damage.__name__}", seen)


def test_a_sound_file_is_left_alone(copy: Path) -> None:
    before = copy.read_bytes()
    assert use(copy) == []
    copy.write_bytes(before)
    assert repair(copy).kept is None
    assert copy.read_bytes() == before
    assert [file.name for file in copy.parent.iterdir()] == ["chats"]


def _wrong_values() -> Iterator[tuple[str, str, int]]:
    for table, columns in COLUMNS.items():
        for column in columns:
            yield from ((table, column, number) for number in range(len(WRONG)))


def check_value(path: Path, table: str, column: str, number: int, all_rows: bool) -> bool:
    """Whether the value made any use fail."""
    wrong_value(path, table, column, WRONG[number], all_rows=all_rows)
    other = path.with_name("other")
    shutil.copy(path, other)
    errors = use(other)
    for file in path.parent.glob("other*"):
        file.unlink()
    check_repaired(path, {})
    with closing(Store(path)) as store:
        n_messages = sum(s.n_messages for s in store.sessions())
        assert n_messages > 100  # no message is left out, whatever is wrong with it
    return bool(errors)


@pytest.mark.slow
@pytest.mark.parametrize("table", COLUMNS)
def test_values_that_make_no_sense(chats: tuple[Path, Told], tmp_path: Path, table: str) -> None:
    cases = [case for case in _wrong_values() if case[0] == table][::N_VALUES]
    n_failed = 0
    for at, (_, column, number) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        path = Path(shutil.copy(chats[0], folder / "chats"))
        n_failed += check_value(path, table, column, number, all_rows=bool(at % 2))
        shutil.rmtree(folder)
    assert n_failed > len(cases) // 10 or table == "preferences"  # most texts are fine as titles


@pytest.mark.attack
@pytest.mark.parametrize("all_rows", [False, True])
@pytest.mark.parametrize("table", COLUMNS)
def test_values_that_make_no_sense_all(chats, tmp_path: Path, table: str, all_rows: bool) -> None:
    for case in _wrong_values():
        if case[0] == table:
            folder = tmp_path / f"{case[1]}-{case[2]}"
            folder.mkdir()
            check_value(Path(shutil.copy(chats[0], folder / "chats")), *case, all_rows=all_rows)
            shutil.rmtree(folder)


@pytest.mark.parametrize("name", SCRIPTS)
def test_tables_that_make_no_sense(copy: Path, name: str) -> None:
    run_script(copy, name)
    other = copy.with_name("other")
    shutil.copy(copy, other)
    use(other)
    for file in copy.parent.glob("other*"):
        file.unlink()
    check_repaired(copy, {})


def test_a_log_that_is_damaged(chats: tuple[Path, Told], tmp_path: Path) -> None:
    base = tmp_path / "open"
    base.mkdir()
    with closing(Store(Path(shutil.copy(chats[0], base / "chats")))) as store:
        chat = ChatSession(store, model="m", params=SamplingParams())
        for turn in range(20):
            chat.say(f"new.{turn} " * 300)
        chat.rename("new.")
        whole = {file.name: file.read_bytes() for file in base.iterdir()}
    log = whole["chats-wal"]
    assert len(log) > 20 * 4096
    for seed in range(3 * N_SEEDS):
        dice = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        after = bytearray(log)
        damage = dice.choice(BYTE_DAMAGES)
        damage(after, dice)
        for suffix, data in (("", whole["chats"]), ("-wal", after), ("-shm", whole["chats-shm"])):
            (folder / f"chats{suffix}").write_bytes(data)
        for suffix in ("", "-wal"):
            shutil.copy(folder / f"chats{suffix}", folder / f"other{suffix}")
        use(folder / "other")
        for file in folder.glob("other*"):
            file.unlink()
        check_repaired(folder / "chats", {})
        shutil.rmtree(folder)


def test_a_log_alone_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "chats"
    with closing(Store(path)) as store:
        chat = ChatSession(store, model="m", params=SamplingParams())
        chat.say("Only in the log")
        log = Path(f"{path}-wal").read_bytes()
    for file in tmp_path.iterdir():
        file.unlink()
    Path(f"{path}-wal").write_bytes(log)
    with pytest.raises(DamagedStoreError):
        Store(path)
    repair(path)
    assert list(contents(path).values()) == [["Only in the log"]]


def test_a_file_that_is_something_else_is_not_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "letters"
    path.write_text("Dear Mia, " * 1000)
    with pytest.raises(LocalKVError, match="nothing in it that could be saved"):
        repair(path)
    assert [file.name for file in tmp_path.iterdir()] == ["letters"]
    with pytest.raises(LocalKVError, match="no such file"):
        repair(tmp_path / "none")
    with pytest.raises(LocalKVError, match="is not a file"):
        repair(tmp_path)


def test_a_file_that_is_open_is_not_repaired(copy: Path) -> None:
    """The other one has to be another process: locks are a process's own."""
    import subprocess
    import sys

    program = f"""
import sys
from localkv.chat.store import Store
store = Store({str(copy)!r})
print(flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(LocalKVError, match="another program has it open"):
            repair(copy)
        process.communicate(b"")
    assert repair(copy).kept is None


def test_repair_on_the_command_line(program, copy: Path) -> None:
    assert program("chat", "--repair", "--sessions", copy).out.startswith(f"{copy} is sound")
    data = bytearray(copy.read_bytes())
    data[4096 * 2 : 4096 * 3] = bytes(4096)
    copy.write_bytes(data)
    with pytest.raises(DamagedStoreError) as raised:
        Store(copy)
    assert raised.value.hint == (
        f"localkv chat --repair --sessions {copy} saves everything that can be read, and keeps the "
        "damaged file"
    )
    result = program("chat", "--repair", "--sessions", copy)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith(f"{copy} was damaged, and is kept as {copy}.damaged-")
    assert lines[1].startswith("saved: 12 sessions with ")
    missing = program("chat", "--repair", "--sessions", copy.with_name("none"))
    assert (missing.code, missing.out, len(missing.err_lines)) == (1, "", 1)


@pytest.mark.attack
def test_a_million_messages_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "chats"
    Store(path).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT INTO sessions VALUES (1, 't', 'm', '', '{}', NULL, NULL, 1.0, 1.0)")
        db.executescript(SCRIPTS["a chain of 10,000"].replace("10000", "1000000"))
    with closing(Store(path)) as store:
        chat = ChatSession(store, model="m", params=SamplingParams()).resumed(1)
        assert len(chat.conversation.path()) == 1_000_000
        chat.show_branch(chat.conversation.path()[0])
        assert len(chat.conversation.path()) == 1_000_000


def test_an_ending_that_no_answer_has_is_damage(copy: Path) -> None:
    with closing(sqlite3.connect(copy)) as db, db:
        db.execute("UPDATE messages SET finish_reason = 5 WHERE role = 'assistant'")
    with closing(Store(copy)) as store:
        errors = list[str]()
        for one in store.sessions():
            try:
                store.session(one.id)
            except DamagedStoreError as error:
                errors.append(error.message)
    assert errors
    assert all("its finish_reason is '5'" in error for error in errors)
    repair(copy)
    with closing(Store(copy)) as store:
        for one in store.sessions():
            assert "5" not in {
                m.finish_reason for m in store.session(one.id).conversation.messages.values()
            }
