"""Files that nobody but their owner may read. Windows keeps a user's data folder so by itself."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

SIDECARS = ("-wal", "-shm", "-journal")
"""Endings of SQLite's files beside a database, while it is open and after a crash."""


def make_private(path: Path, *, own_folder: bool) -> None:
    """Make a file and its folder where there are none, and keep others out of both.

    A folder that is made is private. An existing one is left alone unless it is localkv's own,
    since it may hold shared files.

    Args:
        path: the file, without symbolic links.
        own_folder: whether the folder holds only localkv's files.

    Raises:
        OSError: it is not a file, or can't be made.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if own_folder:
        tighten(path.parent)
    with suppress(FileExistsError):
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            if os.name == "posix":
                os.fchmod(handle, 0o600)  # despite the umask
        finally:
            os.close(handle)
    # It is not opened here: closing it would take the locks that SQLite holds in this process.
    for file in (path, *(Path(f"{path}{suffix}") for suffix in SIDECARS)):
        if file.is_file():
            tighten(file)


def is_private(path: Path) -> bool:
    """Whether others can't read or write a file or folder."""
    return os.name != "posix" or not path.stat().st_mode & 0o077


def tighten(path: Path) -> None:
    """Take all rights from others, if it is the user's."""
    with suppress(OSError):  # it has just gone, or its file system has no modes
        info = path.stat()
        if os.name == "posix" and info.st_uid == os.geteuid() and not is_private(path):
            path.chmod(stat.S_IMODE(info.st_mode) & 0o700)
