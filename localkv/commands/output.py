"""What commands write: messages, tables, a progress line, and the result.

Messages are one plain line each, on stderr; stdout holds the result of a command and nothing else.
Text written to a terminal can't steer it: everything goes through `Terminal`, which makes visible
what is not `OwnText`. Files and pipes get every byte as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, cast

from localkv.errors import LocalKVError, UsageError
from localkv.option_checks import nearest_name
from localkv.system.terminal_text import visible


def escaped(text: str) -> str:
    r"""`text` with line breaks and whatever could steer a terminal as \n, \x1b and so on."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """`text` with spaces for line breaks, and `escaped`."""
    return escaped(" ".join(text.splitlines()))


def say(text: str) -> None:
    """Print one line on stderr, which may be closed."""
    if sys.stderr is not None:
        print(one_line(text), file=sys.stderr, flush=True)


def note(text: str) -> None:
    say(f"note: {text}")


def warn(text: str) -> None:
    say(f"warning: {text}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or nothing."""
    nearest = nearest_name(name, known)
    return f"; did you mean {nearest}?" if nearest else ""


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with the first column flush left and the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


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


_TO_LINE_START = "\r\x1b[K"


class ProgressLine:
    """Shows nothing where stderr is no terminal.

    Attributes:
        on_terminal: whether it shows anything.
    """

    def __init__(self) -> None:
        self.on_terminal = sys.stderr is not None and sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line."""
        self._print(_TO_LINE_START + one_line(text))

    def clear(self) -> None:
        """Make room for other output."""
        self._print(_TO_LINE_START)

    def _print(self, text: str) -> None:
        if self.on_terminal:
            print(OwnText(text), end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.clear()


class TextOutput:
    """A place for text, which ends it with a line break if it has none.

    Every piece is written through at once, so an interruption loses no generated text.
    A file is emptied by the first `write`, not before: a run that fails early leaves it alone.

    Args:
        path: a file, or None for stdout.
        raw: whether a terminal gets control characters as they are.

    Raises:
        UsageError: the file can't be written.
    """

    def __init__(self, path: str | None, *, raw: bool = False) -> None:
        self._raw = raw
        self._path = None if path is None or path == "-" else Path(path)
        self._file: TextIO | None = None
        self._last = ""
        if self._path is not None:
            check_writable(self._path)

    def write(self, piece: str) -> None:
        if not piece:
            return
        file = self._open()
        try:
            file.write(piece)
            file.flush()
        except OSError as error:
            if self._path is None:
                raise
            with suppress(OSError):  # it would try to write the rest once more
                file.close()
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._last = piece[-1]

    def _finish(self) -> None:
        """End the text with the line break that it lacks."""
        if self._last != "\n":
            self.write("\n")

    def _open(self) -> TextIO:
        if self._file is None:
            if self._path is not None:
                self._file = guarded(self._path.open("w", encoding="utf-8", newline=""))
            elif sys.stdout is not None:
                self._file = sys.stdout
            else:
                raise LocalKVError("stdout is closed", hint="-o FILE writes to a file")
            if self._raw:
                self._file = unguarded(self._file)
        return self._file

    def __enter__(self) -> TextOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """An interrupted text is ended like any other; an empty one is not begun by an error."""
        try:
            if kind is None or (self._last and not isinstance(error, OSError)):
                self._finish()
        finally:
            if self._path is not None and self._file is not None:
                self._file.close()


def check_writable(path: Path) -> None:
    """Find out before the model is loaded, without touching the file."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a file to write")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise UsageError(f"{path} can't be written")
    elif not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder")
    elif not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path.parent} can't be written to")
