"""Standard output and errors that are terminals: text written there cannot steer them.

Everything that the program prints goes through `Terminal`, so no command can forget it: what is not
`OwnText` is made visible. Files and pipes get every byte as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from localkv.system.terminal_text import visible


class OwnText(str):
    """The program's own text, which may hold codes for colour and movement.

    Text from elsewhere has passed `one_line` before it becomes part of it. Adding to it keeps the
    type.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> OwnText:
        return OwnText(str.__add__(self, other if isinstance(other, OwnText) else visible(other)))


class Terminal:
    """A stream that shows control characters instead of sending them.

    It has no `buffer`: nothing gets past it as bytes. A carriage return waits for the next
    character, and is dropped before a line feed.

    Args:
        stream: a text stream that is a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._waiting = ""

    def write(self, text: str) -> int:
        if isinstance(text, OwnText):
            shown = visible(self._waiting) + str.__str__(text)
            self._waiting = ""
        else:
            whole = self._waiting + text
            self._waiting = "\r" if whole.endswith("\r") else ""
            shown = visible(whole[: len(whole) - len(self._waiting)].replace("\r\n", "\n"))
        self.stream.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "detach"):
            raise AttributeError(name)
        return getattr(self.stream, name)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; one that is closed is none."""
    return stream is not None and not stream.closed and stream.isatty()


def guarded(stream: TextIO) -> TextIO:
    """`stream`, as a `Terminal` if it is one."""
    return cast(TextIO, Terminal(stream)) if stream.isatty() else stream


def unguarded(stream: TextIO) -> TextIO:
    """The stream that `guarded` was given."""
    return stream.stream if isinstance(stream, Terminal) else stream


def guard_streams() -> None:
    """From now on, all that is written to a terminal goes through `Terminal`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            setattr(sys, name, guarded(stream))
