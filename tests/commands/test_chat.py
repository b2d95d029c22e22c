"""`localkv chat` as a program: without a terminal, and in a real one."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import localkv.commands.chat  # noqa: F401
from localkv.chat.store import Store
from support.paths import MODELS
from support.program import clean_env
from support.waiting import wait_for

MODEL = MODELS / "tales-4M-F16.gguf"
SECONDS = 90.0


def test_without_a_terminal_it_refuses(program, tiny_model: Path) -> None:
    for stdin in (b"", b"Hello"):
        result = program("chat", "-m", tiny_model, stdin=stdin)
        assert (result.code, result.out) == (2, "")
        assert result.err_lines == [
            "error: chat needs a terminal",
            "hint: localkv complete --chat answers one prompt in a pipe",
        ]


def test_with_stderr_redirected_it_says_so_instead_of_drawing_there(tiny_model: Path) -> None:
    own, its = pty.openpty()
    command = [sys.executable, "-m", "localkv", "chat", "-m", str(tiny_model)]
    run = subprocess.run(
        command, stdin=its, stdout=its, stderr=subprocess.PIPE, timeout=SECONDS, env=clean_env()
    )
    os.close(own)
    os.close(its)
    assert run.returncode == 2
    assert run.stderr.decode().splitlines() == [
        "error: chat draws on stderr, which is no terminal",
        "hint: leave out what redirects it (2>)",
    ]


def test_it_takes_the_options_of_complete(program) -> None:
    shown = program("chat", "--help-all").out
    for name in ("--cache-type-k", "-ctv", "--temp", "--samplers", "--threads", "--kv-rotation"):
        assert name in shown
    assert "a CPU is left free" in " ".join(shown.split())


def test_one_cpu_is_left_for_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    chat_module = sys.modules["localkv.commands.chat"]  # the package has the command by that name
    for n_cpus, n_cores, n_threads in ((1, 1, 1), (2, 2, 1), (8, 8, 7), (8, 4, 4)):
        monkeypatch.setattr(chat_module, "usable_cores", lambda n=n_cpus: n)
        monkeypatch.setattr(chat_module, "default_threads", lambda n=n_cores: n)
        assert chat_module.chat_threads() == n_threads


class Terminal:
    """`localkv chat` in tmux."""

    def __init__(self, *argv: object, folder: Path) -> None:
        self.name = f"localkv-test-{uuid.uuid4().hex}"
        command = [sys.executable, "-m", "localkv", "chat", *map(str, argv)]
        env = clean_env(XDG_DATA_HOME=str(folder), TERM="xterm-256color")
        run = ["new-session", "-d", "-x", "100", "-y", "30", "env", *_pairs(env), *command]
        self.tmux(*run, env=env)

    def tmux(self, *argv: str, env: dict[str, str] | None = None) -> str:
        command = ["tmux", "-L", self.name, "-f", "/dev/null", *argv]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def wait_for(self, text: str, *, gone: bool = False) -> str:
        """What is shown once a text is, which may be broken into lines."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            shown = self.tmux("capture-pane", "-p")
            if (text in shown or text in " ".join(shown.split())) is not gone:
                return shown
            time.sleep(0.1)
        raise AssertionError(f"{text!r} is {'still' if gone else 'not'} in:\n{shown}")

    @property
    def runs(self) -> bool:
        command = ["tmux", "-L", self.name, "has-session"]
        return subprocess.run(command, capture_output=True).returncode == 0

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self.name, "kill-server"], capture_output=True)


def _pairs(env: dict[str, str]) -> list[str]:
    names = ("PATH", "PYTHONPATH", "HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")
    return [f"{name}={env[name]}" for name in names if name in env]


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Opens a chat with the model that ships, and more options."""
    if shutil.which("tmux") is None:
        pytest.skip("no tmux")
    opened = []

    def open_chat(*more: object) -> Terminal:
        argv = ("-m", MODEL, "-ctk", "q4_0", "-ctv", "q8_0", "--seed", 5, "--temp", "0.5", *more)
        opened.append(Terminal(*argv, folder=tmp_path))
        return opened[-1]

    yield open_chat
    for terminal in opened:
        terminal.close()


def test_a_conversation_in_a_real_terminal(
    open_terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    terminal = open_terminal("-c", 512)
    terminal.wait_for("Enter sends")
    terminal.keys("-l", "Tell me a story about a fox named Mia.")
    terminal.keys("Enter")
    terminal.wait_for("Mia was")
    shown = terminal.wait_for("prompt tokens reused")
    assert "K q4_0  V q8_0" in shown
    assert "of 512" in shown
    terminal.keys("-l", "Tell me a story about an owl.")
    terminal.keys("C-j")
    terminal.keys("-l", "Please.")
    terminal.keys("Enter")
    terminal.wait_for("Please.")
    terminal.keys("Escape")
    terminal.wait_for("reading the prompt", gone=True)
    terminal.keys("C-q")
    wait_for(lambda: not terminal.runs, seconds=SECONDS)
    store = Store(tmp_path / "localkv" / "chats.sqlite3")
    (session,) = store.sessions()
    path = store.session(session.id).conversation.path()
    store.close()
    assert path[1].content.startswith("Mia was")
    assert path[2].content == "Tell me a story about an owl.\nPlease."


@pytest.mark.slow
def test_a_session_goes_on_with_the_context_that_it_had(
    open_terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    first = open_terminal("-c", 6144, "-n", 4)
    first.wait_for("of 6,144")
    first.keys("-l", "Hello.")
    first.keys("Enter")
    first.wait_for("reused")  # the last word of a line that may be broken
    first.keys("C-d")
    wait_for(lambda: not first.runs, seconds=SECONDS)
    again = Terminal("-m", MODEL, "--continue", folder=tmp_path)
    try:
        again.wait_for("holds 6,144 tokens (K q4_0, V q8_0), as")
    finally:
        again.close()
    smaller = open_terminal("-c", 512, "--continue")
    assert "as before" not in smaller.wait_for("of 512")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "closed"])
def test_what_was_shown_survives_the_terminal(
    open_terminal: Callable[..., Terminal], tmp_path: Path, how: str
) -> None:
    terminal = open_terminal("-c", 32768, "--ignore-eos")
    terminal.wait_for("of 32,768")
    terminal.keys("-l", "Tell me a story about a fox named Mia.")
    terminal.keys("Enter")
    terminal.wait_for("friend")
    shown = terminal.tmux("capture-pane", "-p")
    if how == "SIGKILL":
        os.kill(int(terminal.tmux("display-message", "-p", "#{pane_pid}")), signal.SIGKILL)
    else:
        terminal.close()
    store = Store(tmp_path / "localkv" / "chats.sqlite3")
    (session,) = store.sessions()
    _, answer = store.session(session.id).conversation.path()
    store.close()
    said = [line.removeprefix(" ▌ ") for line in shown.splitlines() if line.startswith(" ▌ ")]
    lines = [line.strip(" ▁▂▃▄▅▆▇█") for line in said if "▌" not in line]  # that is a notice's
    text = [line for line in lines if len(line) > 60]
    assert text
    for line in text:
        assert " ".join(line.split()) in " ".join(answer.content.split())
    open_terminal("-c", 512, "--continue").wait_for("interrupted")
