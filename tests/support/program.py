"""Runs the command line, in this process or as a program of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from localkv.cli import run

if TYPE_CHECKING:
    from support.fake_hub import FakeHub

_VARIABLES = ("LOCALKV_", "LLAMA_ARG_")


@dataclass(frozen=True)
class Result:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def err_lines(self) -> list[str]:
        return self.err.splitlines()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Program:
    """`localkv` in this process: fast, and what it imports can be replaced.

    Attributes:
        env: variables that it sees; no others of localkv's or llama.cpp's.
        config: its configuration file, which does not exist unless a test writes it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch = monkeypatch
        for name in list(os.environ):
            if name.startswith(_VARIABLES):
                monkeypatch.delenv(name)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
        self.config = folder / "localkv" / "config.toml"

    def setenv(self, **variables: str) -> None:
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)

    def write_config(self, text: str) -> None:
        self.config.parent.mkdir(exist_ok=True)
        self.config.write_text(text, encoding="utf-8")

    def __call__(self, *argv: object, stdin: bytes | None = b"") -> Result:
        """Run with these arguments; `stdin` None is a terminal."""
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        source = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="utf-8")
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", _Terminal() if stdin is None else source)
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            code = run([str(arg) for arg in argv])
        texts = []
        for stream in (out, err):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode("utf-8"))
        return Result(code, *texts)


def clean_env(**variables: str) -> dict[str, str]:
    """The environment for a process of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_VARIABLES)}
    return {**env, "XDG_CONFIG_HOME": "/nonexistent", **variables}


class Process(subprocess.Popen[bytes]):
    """Its `with` ends at once when a test fails, however long the program would go on."""

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *details)


def hub_env(hub: FakeHub, home: Path) -> dict[str, str]:
    """The variables of a process that takes its models from a hub of ours."""
    return clean_env(HF_ENDPOINT=hub.url, HF_HOME=str(home), HF_TOKEN="", HF_HUB_OFFLINE="0")


MODULE = (sys.executable, "-m", "localkv")


def localkv_process(*argv: object, command: Sequence[str] = MODULE, **popen: object) -> Process:
    """Start `python -m localkv` with pipes for all three streams, unless told otherwise."""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    words = [*command, *map(str, argv)]
    return Process(words, **{**streams, "env": clean_env(), **popen})


def on_terminal(*argv: object, command: Sequence[str] = MODULE) -> tuple[int, bytes]:
    """Run on a terminal of its own: the exit code and all that was shown."""
    import pty

    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    shown = b""
    env = clean_env(TERM="xterm", COLUMNS="100")
    with localkv_process(*argv, command=command, **streams, env=env) as process:
        os.close(theirs)
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # Linux's way to say that the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(ours)
    return process.returncode, shown


HEAVY = (
    "torch",
    "huggingface_hub",
    "hf_xet",
    "tokenizers",
    "jinja2",
    "numpy",
    "rich.console",
    "textual",
)
LOADED = f"""
import sys
from localkv.cli import run
code = run(sys.argv[1:])
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


def loaded_by(*argv: object) -> list[str]:
    """The heavy modules that a command imports."""
    command = [sys.executable, "-c", LOADED, *map(str, argv)]
    done = subprocess.run(
        command, env=clean_env(), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return [name for name in HEAVY if repr(name) in done.stderr]
