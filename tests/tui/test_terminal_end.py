"""The terminal is closed and SIGHUP ignored: the chat ends, whatever its screen is at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT, TESTS
from support.program import clean_env
from support.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ends programs by itself")

WATCH = """
import sys, time
from localkv.tui import app as terminal
terminal.GRACE_SECONDS = 0.2
terminal.when_terminal_ends({end})
print("ready", flush=True)
while True:
    time.sleep(1)
"""

CHAT = """
import os, fcntl, signal, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from localkv.chat.engine import EngineOptions
from localkv.chat.session import ChatSession
from localkv.chat.store import Store
from localkv.sampling.params import SamplingParams
from localkv.tui.app import ChatApp
from localkv.tui.chat_screen import ChatScreen
from support.chat_pilot import FakeModels
from support.fake_engine import FakeEngine
# 30 pieces that nobody takes in 0.15 s
ChatApp.on_ready = lambda app: app.set_interval(0.005, app.bell)
session = ChatSession(Store(sys.argv[1]), model="tiny.gguf", params=SamplingParams())
screen = ChatScreen(session, EngineOptions("tiny.gguf"), lambda _: FakeEngine([]), FakeModels())
ChatApp(screen).run()
"""


def exit_code(code: str, *argv: str, ready: bytes) -> int:
    """The exit of a program whose terminal is closed as soon as it has shown that it is ready.

    It shows a whole line: a terminal shows its end after the rest, and the program's call would
    fail.
    """
    ours, theirs = os.openpty()
    env = clean_env(TERM="xterm-256color", COLUMNS="80", LINES="24", PYTHONPATH=f"{ROOT}:{TESTS}")
    command = [sys.executable, "-c", code, *argv]
    program = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    try:
        shown = b""
        while ready not in shown:
            shown += os.read(ours, 65536)
        os.close(ours)
        wait_for(lambda: program.poll() is not None, "the program goes on", seconds=30)
        return program.returncode
    finally:
        program.kill()
        program.wait()


@pytest.mark.parametrize("end", ["lambda: None", "lambda: 1 / 0"])
def test_the_process_ends_even_if_nothing_comes_of_it(end: str) -> None:
    assert exit_code(WATCH.format(end=end), ready=b"ready\r\n") == 129


@pytest.mark.slow
def test_it_ends_while_more_is_written_than_anybody_takes(tmp_path: Path) -> None:
    """The thread that writes has ended then, and the screen's waits for it."""
    assert exit_code(CHAT, str(tmp_path / "chats"), ready=b"F1") == -1
