"""A folder of files that several processes share, up to a number of bytes.

    FOLDER/lock
    FOLDER/GROUP/SHARD/PARENT-OWN.PART

A group is 32 hexadecimal digits, as are PARENT and OWN. A shard is the first two digits of PARENT,
so that a small folder is listed to find the files of one parent. Nobody but the owner may read any
of it, or write to it: what is read becomes part of answers.

A file gets its name once all of it is written, and never changes. A process that writes has the
lock, and `lock` holds the bytes of all files, so that no two processes exceed the limit together.
Reading takes no lock, since a file that is removed stays there for all that have opened it.

The count is raised before a file has its name. It is made again from the files when the limit is
reached, and when a process begins. So a process that is killed leaves a count that is too large at
most, and a part of a file, which the next count removes.

Files that were not used for the longest time go first. The time of a file's last use is its time of
modification. Files of one text are marked as used one after the other, the last of the text as the
oldest, since they are of no use without those before them.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from localkv.errors import UsageError, printable

BLOCK = 4096
"""Bytes that a file takes are a multiple of it."""
SPARE = 20
"""Where files have to go, one part in this many of the limit is free afterwards."""
NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.([a-z0-9]{1,16})")
GROUP = re.compile(r"[0-9a-f]{32}")
LOCK = "lock"
TEMPORARY = ".part"
"""What the name of a file ends with that is being written."""


class FolderFile(NamedTuple):
    """A file that is there.

    Attributes:
        used: when it was used last, in nanoseconds.
        size: bytes that it takes.
    """

    used: int
    size: int
    path: str


class DiskFolder:
    """A folder that is there, or is made.

    Args:
        path: where.
        most_bytes: that its files take together at most.

    Raises:
        UsageError: it can't be used, or others may write to it.
    """

    def __init__(self, path: str | os.PathLike[str], most_bytes: int) -> None:
        self.path, self.most_bytes = Path(path), most_bytes
        self._mutex = threading.Lock()
        name = printable(path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_private(name)
            with self._locked() as lock:
                _put_count(lock, self._make_room(0))
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(
                f"--cache-disk {name}: {reason}", hint="name a folder of your own on a local disk"
            ) from error

    def _check_private(self, name: str) -> None:
        found = self.path.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise UsageError(
                f"--cache-disk {name}: others may write to this folder, and what is read from it "
                "becomes part of answers",
                hint="name a folder of your own that only you may write to (chmod go-w)",
            )

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Keep all other writers out; yields the open file of the lock."""
        with self._mutex:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(self.path / LOCK, flags, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield lock
            finally:
                os.close(lock)

    @property
    def n_bytes(self) -> int:
        """Bytes that all files take, of all processes together, as counted last."""
        try:
            return max(0, int((self.path / LOCK).read_bytes() or b"0"))
        except (OSError, ValueError):
            return 0

    def path_of(self, group: str, name: str) -> str:
        """Where a file is, or would be."""
        return f"{self.path}/{group}/{name[:2]}/{name}"

    def children(self, group: str, parent: str) -> list[str]:
        """The names of a parent's files, those used last first."""
        found = list[tuple[int, str]]()
        with suppress(OSError), os.scandir(self.path / group / parent[:2]) as entries:
            for entry in entries:
                if entry.name.startswith(parent) and NAME.fullmatch(entry.name):
                    with suppress(OSError):  # it has just gone
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
        return [name for _, name in sorted(found, reverse=True)]

    def write(self, group: str, name: str, size: int, write: Callable[[BinaryIO], None]) -> int:
        """Make a file, after others have gone if it takes that.

        Args:
            size: bytes of it.
            write: writes them.

        Returns:
            its bytes; 0 if it is there already, or larger than all may be together.

        Raises:
            OSError: it can't be written.
        """
        goal, size = self.path_of(group, name), _whole_blocks(size)
        if size > self.most_bytes:
            return 0
        with self._locked() as lock:
            if os.path.exists(goal):
                return 0
            before = _count(lock)
            if before is None or before + size > self.most_bytes:
                before = self._make_room(size)
            _put_count(lock, before + size)
            try:
                self._write(goal, write)
            except BaseException:
                _put_count(lock, before)
                raise
        return size

    def _write(self, goal: str, write: Callable[[BinaryIO], None]) -> None:
        folder, temporary = Path(goal).parent, f"{goal}{TEMPORARY}"
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "w+b") as file:
                write(file)
            os.replace(temporary, goal)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def remove(self, path: str) -> None:
        """Remove a file, if it is still there."""
        with suppress(OSError), self._locked() as lock:
            size = _whole_blocks(os.stat(path).st_size)
            os.unlink(path)
            count = _count(lock)
            _put_count(lock, max(0, (count or 0) - size))

    @staticmethod
    def use(paths: Sequence[str]) -> None:
        """Note that the files of a text were of use, in their order."""
        now = time.time_ns()
        for number, path in enumerate(paths):
            with suppress(OSError):  # it has just gone
                os.utime(path, ns=(now, now - 1000 * number))

    def _make_room(self, size: int) -> int:
        """Remove what was not used for the longest time; bytes of what is left."""
        files = sorted(self._files())
        total = sum(file.size for file in files)
        if (
            total + size <= self.most_bytes
        ):  # another process has been killed, or files were removed
            return total
        goal = max(0, self.most_bytes - size - self.most_bytes // SPARE)
        for file in files:
            if total <= goal:
                break
            with suppress(FileNotFoundError):
                os.unlink(file.path)
            total -= file.size
        return total

    def _files(self) -> Iterator[FolderFile]:
        """Yield all files, and remove what a process that was killed has left of others. The lock
        is held."""
        for group in self._folders(self.path, GROUP):
            for shard in self._folders(group, re.compile("[0-9a-f]{2}")):
                with suppress(FileNotFoundError), os.scandir(shard) as entries:
                    for entry in entries:
                        if entry.name.endswith(TEMPORARY):
                            with suppress(OSError):
                                os.unlink(entry.path)
                        elif NAME.fullmatch(entry.name):
                            with suppress(FileNotFoundError):
                                found = entry.stat(follow_symlinks=False)
                                if stat.S_ISREG(found.st_mode):
                                    size = _whole_blocks(found.st_size)
                                    yield FolderFile(found.st_mtime_ns, size, entry.path)

    @staticmethod
    def _folders(path: str | Path, names: re.Pattern[str]) -> list[str]:
        with os.scandir(path) as entries:
            return [
                entry.path
                for entry in entries
                if names.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]


def disk_folder(path: str | os.PathLike[str], most_bytes: int, *, has_budget: bool) -> DiskFolder:
    """The folder that a model's texts are to be kept in.

    Args:
        has_budget: of the model's cache.

    Raises:
        UsageError: it can't be used, or pages change their types, so that they can't be kept.
    """
    if has_budget:
        raise UsageError(
            "--cache-disk can't keep pages that change their types (--kv-budget)",
            hint="leave out one of the two",
        )
    return DiskFolder(path, most_bytes)


def _whole_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _count(lock: int) -> int | None:
    """The bytes of all files; None if nobody has counted them, or to the end."""
    text = os.pread(lock, 32, 0)
    return int(text) if text.isdigit() else None


def _put_count(lock: int, n_bytes: int) -> None:
    os.pwrite(lock, f"{n_bytes:020}".encode(), 0)
