"""The chat's program when its terminal, its file or itself is taken away: nobody is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localkv.chat.conversation import Message
from localkv.chat.store import Store
from localkv.errors import LocalKVError
from support.paths import MODELS
from support.program import clean_env
from support.waiting import runs, wait_for

MODEL = MODELS / "tales-4M-F16.gguf"
SECONDS = 90.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and terminals")

RUN = """
import fcntl, os, signal, sys, termios
if sys.argv[1] == "controlling":
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
elif sys.argv[1] == "ignored":
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
else:
    os.setsid()
os.execv(sys.executable, [sys.executable, "-m", "localkv", "chat", *sys.argv[2:]])
"""


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


class Chat:
    """`localkv chat` on a terminal of its own.

    Args:
        folder: its data folder; the cache of kernels, too, if `cold`.
        store: the file of its sessions, if it is elsewhere.
        terminal: "controlling", which sends SIGHUP when it is closed; "ignored", where SIGHUP does
            nothing; or "other", which sends none.
    """

    def __init__(
        self,
        folder: Path,
        *argv: object,
        terminal: str,
        cold: bool = False,
        store: Path | None = None,
    ) -> None:
        self.store_path = store or folder / "chats"
        self.ours, theirs = os.openpty()
        env = clean_env(TERM="xterm-256color", COLUMNS="100", LINES="30")
        if cold:
            env["XDG_CACHE_HOME"] = str(folder / "cache")
        options = ["-m", MODEL, "-c", 32768, "--ignore-eos", "--sessions", self.store_path, *argv]
        command = [sys.executable, "-c", RUN, terminal, *map(str, options)]
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, 100, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env
        )
        os.close(theirs)
        self.shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while part := os.read(self.ours, 65536):
                self.shown += part

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def wait_shown(self, text: str) -> None:
        wait_for(lambda: text.encode() in self.shown, f"{text!r} is not shown")

    def close_terminal(self) -> None:
        os.close(self.ours)
        self.ours = -1

    def messages(self) -> list[Message]:
        with closing(Store(self.store_path)) as store:
            return [
                message
                for session in store.sessions()
                for message in store.session(session.id).conversation.path()
            ]

    def answer(self) -> str:
        messages = self.messages()
        return messages[-1].content if messages and messages[-1].role == "assistant" else ""

    def family(self) -> list[int]:
        return [self.process.pid, *descendants(self.process.pid)]

    def clear_up(self) -> None:
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self.ours >= 0:
            self.close_terminal()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Chat]]:
    chats = []

    def start(*argv: object, terminal: str = "controlling", **options: Any) -> Chat:
        chats.append(Chat(tmp_path, *argv, terminal=terminal, **options))
        return chats[-1]

    yield start
    for chat in chats:
        chat.clear_up()


WAYS: dict[str, Callable[[Chat], object]] = {
    "closed": Chat.close_terminal,
    "SIGHUP": lambda chat: chat.process.send_signal(signal.SIGHUP),
    "SIGTERM": lambda chat: chat.process.send_signal(signal.SIGTERM),
    "SIGKILL": lambda chat: chat.process.kill(),
}


def check_end(chat: Chat, way: str) -> None:
    """End it in some way; nothing of it goes on running."""
    family = chat.family()
    assert len(family) > 1
    WAYS[way](chat)
    wait_for(lambda: chat.process.poll() is not None, "the chat goes on")
    wait_for(lambda: not any(map(runs, family)), "a process was left behind")
    assert b"Traceback" not in chat.shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "terminal"),
    [
        ("closed", "controlling"),
        ("closed", "ignored"),
        pytest.param("closed", "other", marks=pytest.mark.attack),
        pytest.param("SIGHUP", "controlling", marks=pytest.mark.attack),
        pytest.param("SIGTERM", "controlling", marks=pytest.mark.attack),
        pytest.param("SIGKILL", "controlling", marks=pytest.mark.attack),
    ],
)
def test_it_ends_in_the_middle_of_an_answer(
    start: Callable[..., Chat], way: str, terminal: str
) -> None:
    chat = start(terminal=terminal)
    chat.wait_shown("Enter sends")
    chat.type("Tell me a story.\r")
    wait_for(lambda: len(chat.answer()) > 100, "no answer")
    before = chat.answer()
    check_end(chat, way)
    assert chat.answer().startswith(before)
    assert [message.content for message in chat.messages()[:1]] == ["Tell me a story."]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "cold"),
    [
        ("closed", False),
        pytest.param("closed", True, marks=pytest.mark.attack),
        pytest.param("SIGKILL", False, marks=pytest.mark.attack),
        pytest.param("SIGKILL", True, marks=pytest.mark.attack),
    ],
)
def test_it_ends_while_it_loads(start: Callable[..., Chat], way: str, cold: bool) -> None:
    chat = start(cold=cold)
    wait_for(lambda: len(chat.family()) > 1, "no engine")
    if cold:  # processes that compile are there, too
        wait_for(lambda: len(chat.family()) > 2, "no helper")
    chat.type("Hello?\r")
    wait_for(chat.messages, "nothing was said")
    check_end(chat, way)
    asked, *answers = chat.messages()
    assert asked.content == "Hello?"
    assert [message.role for message in answers] in ([], ["assistant"])  # a model loads fast


@pytest.mark.attack
def test_two_screens_on_one_file(start: Callable[..., Chat]) -> None:
    one, two = start(), start()
    for chat in (one, two):
        chat.wait_shown("Enter sends")
    one.type("First screen\r")
    two.type("Second screen\r")
    wait_for(lambda: len(one.messages()) == 4, "a message is missing")
    wait_for(lambda: sum(len(m.content) > 100 for m in one.messages()) == 2, "no answers")
    one.type("\x1b")
    two.type("\x1b")
    time.sleep(1)  # else Escape and the next key are one
    for chat, title in ((one, "Second"), (two, "First")):
        chat.shown = b""
        wait_for(lambda: len(chat.messages()) == 4, "rows are lost")  # noqa: B023
        chat.type("\x0f")
        chat.wait_shown(title)
        check_end(chat, "SIGKILL")
    assert sorted(m.content for m in one.messages() if m.role == "user") == [
        "First screen",
        "Second screen",
    ]


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_while_it_answers(start: Callable[..., Chat], little_disk: Path) -> None:
    chat = start(store=little_disk / "chats")
    chat.wait_shown("Enter sends")
    chat.type("Tell me a story.\r")
    wait_for(lambda: len(chat.answer()) > 100, "no answer")
    with contextlib.suppress(OSError), (little_disk / "filler").open("wb", 0) as filler:
        while True:
            filler.write(bytes(4096))
    chat.wait_shown("disk")
    seen = len(chat.shown)
    wait_for(lambda: len(chat.shown) > seen + 2000, "the answer does not go on")
    assert chat.process.poll() is None
    chat.type("\x1b")  # ends the answer
    time.sleep(1)
    (little_disk / "filler").unlink()
    before = len(chat.answer())
    chat.type("And then?\r")
    wait_for(lambda: len(chat.messages()) == 4, "the next message is not stored")
    assert len(chat.messages()[1].content) > before  # what had no room is there now
    check_end(chat, "SIGKILL")


@pytest.mark.slow
def test_a_disk_that_can_not_be_written(little_disk: Path) -> None:
    Store(little_disk / "chats").close()
    subprocess.run(["mount", "-o", "remount,ro", str(little_disk)], check=True)
    for path in (little_disk / "chats", little_disk / "new"):
        with pytest.raises(LocalKVError) as raised:
            Store(path)
        assert str(path) in raised.value.message
