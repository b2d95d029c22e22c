"""Small files that a user names: read up to a limit, and written whole or not at all.

Only files are read where reading can end. A full disk doesn't cost the old content of a file that
is written.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

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


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, or leave it as it is.

    The bytes go to a file beside it first, which then takes its name. Anything but a regular
    file, such as /dev/stdout, is written to directly, and so is a file in a read-only folder.

    Raises:
        OSError: it can't be written; it names the file.
    """
    goal = Path(os.path.realpath(path))
    try:
        if _takes_a_new_file(goal):
            with _beside(goal) as file:
                file.write(data)
        else:
            goal.write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that takes its name once all of it is on the disk.

    Bytes may be written at any place in it. If an error ends the block, the new file is removed,
    and a file that had the name stays as it is.

    Raises:
        OSError: it can't be written, or the name belongs to something other than a file.
    """
    check_place(path)
    goal = Path(os.path.realpath(path))
    with _beside(goal) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(goal.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_place(path: str | os.PathLike[str]) -> None:
    """Refuse a place where `written_whole` can't write, before there is anything to write.

    Raises:
        OSError: there is no such folder, or none that may be written to, or something else than a
            file has the name.
    """
    goal = Path(os.path.realpath(path))
    if goal.exists() and not goal.is_file():
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    problem = 0
    if not stat.S_ISDIR(goal.parent.stat().st_mode):
        problem = errno.ENOTDIR
    elif not os.access(goal.parent, os.W_OK | os.X_OK):
        problem = errno.EACCES
    if problem:
        raise OSError(problem, os.strerror(problem), os.fspath(path))


def _takes_a_new_file(goal: Path) -> bool:
    if not os.access(goal.parent, os.W_OK | os.X_OK):
        return False
    try:
        return stat.S_ISREG(goal.stat().st_mode)
    except FileNotFoundError:
        return True


@contextmanager
def _beside(goal: Path) -> Iterator[BinaryIO]:
    """A file in the same folder, which takes the name in the end; else nothing is left of it."""
    handle, temporary = tempfile.mkstemp(dir=goal.parent, prefix=f".{goal.name[:50]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(temporary, _mode(goal))
        os.replace(temporary, goal)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _mode(goal: Path) -> int:
    """The mode of the file that is replaced, or the one that the umask gives a new file."""
    try:
        return stat.S_IMODE(goal.stat().st_mode)
    except FileNotFoundError:
        umask = os.umask(0o077)
        os.umask(umask)
        return 0o666 & ~umask
