"""Ctrl+Z on a terminal with a shell: the chat stops, and goes on where it was."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import pytest

from support.paths import ROOT, TESTS
from support.program import clean_env

SECONDS = 30.0

# A shell with job control that knows one command: it says when its job has stopped, and continues
# it for each line that it reads from the descriptor `orders`.
SHELL = """
import fcntl, os, signal, sys, termios
orders, news = map(int, sys.argv[1:])
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = os.fork()
if not job:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, "-c", os.environ["JOB"]])
while True:
    _, status = os.waitpid(job, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        break
    os.tcsetpgrp(0, os.getpgrp())
    os.write(news, b"stopped ")
    os.read(orders, 1)
    os.tcsetpgrp(0, job)
    os.killpg(job, signal.SIGCONT)
os.write(news, b"ended ")
"""

JOB = """
from localkv.chat.engine import EngineOptions
from localkv.chat.session import ChatSession
from localkv.chat.store import Store
from localkv.sampling.params import SamplingParams
from localkv.tui.app import ChatApp
from localkv.tui.chat_screen import ChatScreen
from support.chat_pilot import FakeModels
from support.fake_engine import FakeEngine
session = ChatSession(Store(":memory:"), model="tiny.gguf", params=SamplingParams())
engine = FakeEngine(["Welcome back."])
ChatApp(ChatScreen(session, EngineOptions("tiny.gguf"), lambda _: engine, FakeModels())).run()
"""


class Terminal:
    """A pseudo terminal with the shell on it."""

    def __init__(self) -> None:
        self.ours, theirs = os.openpty()
        orders, self.orders = os.pipe()
        self.news, news = os.pipe()
        env = clean_env(
            TERM="xterm-256color", COLUMNS="80", LINES="24", JOB=JOB, PYTHONPATH=f"{ROOT}:{TESTS}"
        )
        command = [sys.executable, "-c", SHELL, str(orders), str(news)]
        self.shell = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, pass_fds=(orders, news)
        )
        for end in (theirs, orders, news):
            os.close(end)

    def press(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def wait(self, text: str, descriptor: int | None = None) -> None:
        """Until the terminal, or another descriptor, has shown a text since the last wait."""
        shown, end = "", time.monotonic() + SECONDS
        while text not in shown:
            ready, _, _ = select.select([self.ours, self.news], [], [], end - time.monotonic())
            assert ready, f"no {text!r} in {shown!r}"
            for source in ready:
                try:
                    read = os.read(source, 65536).decode(errors="replace")
                except OSError:  # the other end of the terminal is closed
                    read = ""
                if source == (descriptor or self.ours):
                    shown += read


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no job control")
def test_the_chat_is_suspended_and_comes_back() -> None:
    terminal = Terminal()
    try:
        terminal.wait("F1")
        terminal.press(b"\x1a")
        terminal.wait("stopped", terminal.news)
        os.write(terminal.orders, b".")
        terminal.wait("F1")  # the screen is drawn anew
        terminal.press(b"hello\r")
        terminal.wait("Welcome")
        terminal.press(b"\x11")
        terminal.wait("ended", terminal.news)
    finally:
        terminal.shell.kill()
        terminal.shell.wait()
        for end in (terminal.ours, terminal.orders, terminal.news):
            os.close(end)
