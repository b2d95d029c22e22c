"""Where the result goes: stdout, or a file that is written as the text comes."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from localkv.cli.output.terminal import guarded, unguarded
from localkv.errors import LocalKVError, UsageError


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
