"""stdin, stdout and stderr of the program, whatever they were when it was started.

stdout takes the result: if it can't be written, that is an error. stderr takes everything else: if
that can't be written, nobody is there to read it, and the result comes all the same.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any


def prepare_streams() -> None:
    """Take over the standard streams of this process, before anything is written or opened."""
    _occupy_closed()
    if sys.stdout is None:
        sys.stdout = _ClosedOutput()
    if sys.stderr is not None:
        buffer = io.BufferedWriter(_PatientOutput(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(
            buffer, sys.stderr.encoding, sys.stderr.errors, line_buffering=True
        )


def _occupy_closed() -> None:
    """Open the null device in place of closed descriptors.

    The next file to be opened would get their numbers, a database say, and libraries that print to
    stderr would print into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


class _PatientOutput(io.FileIO):
    """Accepts text that can't be written, and drops it."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written


class _ClosedOutput(io.TextIOBase):
    """A stream that was closed when the program started. Only writing shows it."""

    encoding, errors = "utf-8", "replace"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "stdout is closed")
