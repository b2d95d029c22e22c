"""Memory that the system must keep in RAM: never swapped out, and no file's page dropped.

By mlock of POSIX. A lock lasts until it is taken back or the memory is unmapped.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from localkv.errors import byte_size

Range = tuple[int, int]
"""Address and bytes."""


@dataclass(frozen=True)
class Lock:
    """The outcome of `lock`.

    Attributes:
        ranges: whole pages that are locked.
        n_bytes: bytes of them.
        problem: the reason why the rest is not, or None.
    """

    ranges: tuple[Range, ...]
    problem: str | None = None

    @property
    def n_bytes(self) -> int:
        return sum(n for _, n in self.ranges)


def lock(ranges: Iterable[Range]) -> Lock:
    """Lock the pages of ranges until one can't be locked. Locking reads the pages of a file."""
    libc = _libc()
    if libc is None:
        return Lock((), "this system has no mlock")
    done: list[Range] = []
    for address, n_bytes in whole_pages(ranges):
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes)):
            return Lock(tuple(done), _problem(ctypes.get_errno()))
        done.append((address, n_bytes))
    return Lock(tuple(done))


def unlock(ranges: Sequence[Range]) -> None:
    """Take locks back; the memory must not have been unmapped."""
    libc = _libc()
    for address, n_bytes in ranges if libc is not None else ():
        libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes))


def whole_pages(ranges: Iterable[Range]) -> list[Range]:
    """Ranges as whole pages, each page once, in order."""
    found: list[Range] = []
    for address, n_bytes in sorted(ranges):
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(address + n_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and start <= found[-1][0] + found[-1][1]:
            start, last = found[-1][0], sum(found.pop())
            end = max(end, last)
        if end > start:
            found.append((start, end - start))
    return found


def _libc() -> Any:
    return None if sys.platform == "win32" else ctypes.CDLL(None, use_errno=True)


def _problem(number: int) -> str:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and number in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        return f"the limit is {byte_size(limit)} (ulimit -l); ulimit -l unlimited raises it"
    return os.strerror(number)
