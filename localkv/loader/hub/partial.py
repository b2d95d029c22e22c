"""The part of a file that has arrived: on disk, with its checksum so far."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from localkv.loader.hub.repo_model import RepoFile

if TYPE_CHECKING:
    from io import FileIO

_READ_BYTES = 1 << 22


def digest(file: RepoFile) -> str:
    """The digest of a file out of a listing."""
    assert file.digest is not None, "a file in a listing of the hub has one"
    return file.digest


def present_bytes(path: Path, n_bytes: int) -> int:
    """Bytes of a file that are there; 0 if they are of no use."""
    present = path.stat().st_size if path.is_file() else 0
    return present if present <= n_bytes else 0


class Partial:
    """A file that grows at its end.

    Args:
        path: where it is; an existing part is read for the checksum.
        file: the whole file.

    Attributes:
        n_bytes: the bytes that have arrived.

    Raises:
        OSError: it can't be read or written, or something else is in its place.
    """

    def __init__(self, path: Path, file: RepoFile) -> None:
        self._path = path
        self._file = file
        self._out = _open(path)
        self._start_checksum()
        self.n_bytes = 0
        try:
            while data := self._out.read(_READ_BYTES):
                self._checksum.update(data)
                self.n_bytes += len(data)
            if self.n_bytes > file.n_bytes:
                self.restart()
        except BaseException:
            self._out.close()
            raise

    def _start_checksum(self) -> None:
        if len(digest(self._file)) == hashlib.sha256().digest_size * 2:
            self._checksum = hashlib.sha256()
        else:  # git's name for a file that is not in large file storage
            self._checksum = hashlib.sha1(usedforsecurity=False)
            self._checksum.update(b"blob %d\0" % self._file.n_bytes)

    def append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:  # straight to the system, which keeps it even if this process dies
            rest = rest[self._out.write(rest) :]
        self._checksum.update(data)
        self.n_bytes += len(data)

    def restart(self) -> None:
        self._out.truncate(0)
        self._start_checksum()
        self.n_bytes = 0

    def is_right(self) -> bool:
        return self._checksum.hexdigest() == self._file.digest

    def delete(self) -> None:
        self._path.unlink()

    def move_to(self, path: Path) -> None:
        """Give it its place at once, so that no failure lets anybody see a part of it."""
        os.fsync(self._out.fileno())  # before its name, in case the machine goes down
        self._out.close()
        self._path.replace(path)

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()


def _open(path: Path) -> FileIO:
    """A file to read and append to, made if it is not there; through no link, and no pipe."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
        flags |= getattr(os, name, 0)
    file = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    return os.fdopen(file, "r+b", buffering=0)
