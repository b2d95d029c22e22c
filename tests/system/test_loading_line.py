"""The line about a model that takes its time to load: where it shows, when, and how it ends."""

from __future__ import annotations

import io
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from localkv import LLM
from localkv.system import loading_line
from localkv.system.loading_line import LoadingLine, reporting, shows_lines
from support.waiting import wait_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class OutStream(io.StringIO):
    """The stream of a notebook."""

    __module__ = "ipykernel.iostream"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    set_stderr(monkeypatch, stream)
    monkeypatch.setenv("COLUMNS", "40")
    return stream


def set_stderr(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> None:
    """For the line alone: pytest puts its own back before a test begins."""
    monkeypatch.setattr(loading_line, "sys", SimpleNamespace(stderr=stream))


def shown(stream: io.StringIO) -> list[str]:
    return stream.getvalue().split("\r")


def test_it_says_how_far_loading_is(terminal: Terminal) -> None:
    with LoadingLine("tales.gguf", patience=0) as line:
        wait_for(lambda: terminal.getvalue() == "\rloading tales.gguf")
        line("weights", 3, 28)
        wait_for(lambda: terminal.getvalue().endswith("\rloading tales.gguf: 3 of 28 layers"))
        line("kernels", 0, 0)
        wait_for(lambda: "preparing kernels" in terminal.getvalue())
    *_, kernels, nothing, end = shown(terminal)
    assert kernels == "loading tales.gguf: preparing kernels"
    assert nothing == " " * len(kernels)
    assert end == ""


def test_it_counts_kernels(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with LoadingLine("tales.gguf", patience=0) as line:
        line("kernels", 7, 22)
        wait_for(lambda: "\rcompiling kernels" in terminal.getvalue())
    assert "\rcompiling kernels, once for this machine: 7 of 22\r" in terminal.getvalue()


def test_a_long_name_is_cut(terminal: Terminal) -> None:
    with LoadingLine("x" * 100, patience=0):
        wait_for(terminal.getvalue)
    assert max(map(len, shown(terminal))) == 39


def test_what_loads_at_once_shows_nothing(terminal: Terminal) -> None:
    started = time.perf_counter()
    with LoadingLine("tales.gguf") as line:
        line("weights", 1, 2)
    assert time.perf_counter() - started < 0.5
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    ("stream", "shows"), [(Terminal(), True), (OutStream(), True), (io.StringIO(), False)]
)
def test_where_it_shows(stream: io.StringIO, shows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stderr(monkeypatch, stream)
    assert shows_lines() == shows
    with LoadingLine("x", patience=0):
        if shows:
            wait_for(stream.getvalue)
        else:
            time.sleep(0.05)
    assert bool(stream.getvalue()) == shows


def test_no_stderr_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    set_stderr(monkeypatch, None)
    with LoadingLine("x", patience=0) as line:
        line("weights", 1, 2)


def test_an_error_ends_the_line(terminal: Terminal) -> None:
    with suppress(ZeroDivisionError), LoadingLine("x", patience=0):
        wait_for(terminal.getvalue)
        _ = 1 / 0
    assert shown(terminal)[-2:] == [" " * len("loading x"), ""]


def test_whoever_wants_to_know_is_called_instead(tiny_model: Path, terminal: Terminal) -> None:
    seen = list[tuple[str, int, int]]()
    LLM(tiny_model, n_ctx=64, on_progress=lambda *progress: seen.append(progress))
    assert {stage for stage, *_ in seen} == {"weights", "kernels"}
    assert seen[-1] == ("kernels", 0, 0)
    with reporting("x", True, print) as report:
        assert report is print
    assert terminal.getvalue() == ""


def test_a_model_shows_it_unless_told_not_to(
    tiny_model: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_line, "PATIENCE", 0.0)
    LLM(tiny_model, n_ctx=64, progress=False)
    assert terminal.getvalue() == ""
    LLM(tiny_model, n_ctx=64)
    assert shown(terminal)[1].startswith("loading tiny.gguf")
    assert shown(terminal)[-1] == ""
