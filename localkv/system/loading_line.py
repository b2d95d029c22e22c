"""A line on stderr about a model that takes its time to load, and that is gone when it has."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import Event, Thread
from typing import Self, TypeAlias

from localkv.errors import counted

PATIENCE = 1.0
"""Seconds before anything is shown."""

_EVERY = 0.1

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""(stage, done, of all): "weights" with numbers of layers; "kernels" with numbers of those that had
to be compiled, and with 0 and 0 before they are run for the first time."""


def shows_lines() -> bool:
    """Whether stderr shows a line that is written over: a terminal, or a notebook's."""
    stream = sys.stderr
    if stream is None:
        return False
    return stream.isatty() or type(stream).__module__.startswith("ipykernel")


def write_to_stderr(text: str) -> None:
    """Text that may begin with a carriage return, at once; a stderr that has gone is no error."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def compiling_line(n_kernels: int) -> str:
    """What is said where no line can be written over."""
    return f"compiling {counted(n_kernels, 'kernel')}, once for this machine"


def reporting(
    name: str, progress: bool, on_progress: OnProgress | None
) -> AbstractContextManager[OnProgress]:
    """A context with what is called while a model loads: a function of the user's, or a line.

    Args:
        name: the model's.
        progress: whether a line may be shown.
        on_progress: what is called instead.
    """
    if on_progress is not None:
        return nullcontext(on_progress)
    return LoadingLine(name) if progress else nullcontext(lambda stage, done, total: None)


class LoadingLine:
    """Shows the progress of `LLM(...)`; `with` ends it.

    It is called as `on_progress` is. A thread writes, since the loading thread may compile for
    seconds; there is none where nothing can be shown.

    Args:
        name: the model's, one line of plain text.
        write: puts text on the terminal.
        patience: seconds before it is shown, instead of `PATIENCE`.
    """

    def __init__(
        self,
        name: str,
        *,
        write: Callable[[str], None] = write_to_stderr,
        patience: float | None = None,
    ) -> None:
        self._name = name
        self._write = write
        self._patience = PATIENCE if patience is None else patience
        self._text = f"loading {name}"
        self._shown, self._width = "", 0
        self._ended = Event()
        self._thread = Thread(target=self._run, name="loading line", daemon=True)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == "weights":
            self._text = f"loading {self._name}: {done} of {total} layers"
        elif total:
            self._text = f"compiling kernels, once for this machine: {done} of {total}"
        else:
            self._text = f"loading {self._name}: preparing kernels"

    def _run(self) -> None:
        wait = self._patience
        while not self._ended.wait(wait):
            wait = _EVERY
            if self._text != self._shown:
                self._show(self._text)

    def _show(self, text: str) -> None:
        """Put a text over the one that is shown; with spaces, as notebooks can't erase a line."""
        shown = text[: shutil.get_terminal_size().columns - 1]
        self._write("\r" + shown.ljust(self._width))
        self._shown, self._width = text, len(shown)

    def __enter__(self) -> Self:
        if shows_lines():
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.ident is None:
            return
        self._thread.join()
        if self._shown:
            self._show("")
            self._write("\r")
