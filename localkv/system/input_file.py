"""Small files that a user names: read whole, up to a limit, and only where reading can end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from localkv.errors import UsageError, byte_size


def read_input(path: str | os.PathLike[str], most: int, what: str) -> bytes:
    """The bytes of a file.

    Args:
        most: a file of more bytes is refused, before they are read.
        what: the file, for messages.

    Raises:
        UsageError: it is larger; the message starts with `what`.
        OSError: it can't be read.
    """
    with Path(path).open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UsageError(f"{what}: more than {byte_size(most)}")
    return data


def is_endless(path: str | os.PathLike[str]) -> bool:
    """Whether reading it may wait for somebody who never writes: a pipe, a socket, a terminal."""
    mode = os.stat(path).st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or os.fspath(path) == os.devnull)
