"""Pages that are locked in memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import resource
from types import SimpleNamespace
from typing import Any

import pytest

from localkv.system import machine_memory
from localkv.system.machine_memory import Lock, lock, unlock, whole_pages

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize(
    ("ranges", "pages"),
    [
        ([], []),
        ([(PAGE, 0)], []),
        ([(PAGE + 5, 1)], [(PAGE, PAGE)]),
        ([(PAGE + 5, PAGE)], [(PAGE, 2 * PAGE)]),
        ([(9 * PAGE, 1), (PAGE, PAGE)], [(PAGE, PAGE), (9 * PAGE, PAGE)]),
        ([(PAGE, 2 * PAGE), (2 * PAGE, 10)], [(PAGE, 2 * PAGE)]),
        ([(PAGE, 9 * PAGE), (2 * PAGE, PAGE), (4 * PAGE, PAGE)], [(PAGE, 9 * PAGE)]),
        ([(PAGE, PAGE), (2 * PAGE, PAGE)], [(PAGE, 2 * PAGE)]),
    ],
)
def test_each_page_once(ranges: list[tuple[int, int]], pages: list[tuple[int, int]]) -> None:
    assert whole_pages(ranges) == pages


class Libc:
    """mlock that allows `left` bytes, and the locks that it holds."""

    def __init__(self, left: int) -> None:
        self.left, self.locked = left, dict[int, int]()

    def mlock(self, address: ctypes.c_void_p, n_bytes: ctypes.c_size_t) -> int:
        assert address.value is not None
        if n_bytes.value > self.left:
            ctypes.set_errno(errno.ENOMEM)
            return -1
        self.left -= n_bytes.value
        self.locked[address.value] = n_bytes.value
        return 0

    def munlock(self, address: ctypes.c_void_p, n_bytes: ctypes.c_size_t) -> int:
        assert address.value is not None
        assert self.locked.pop(address.value) == n_bytes.value
        return 0


@pytest.fixture
def libc(monkeypatch: pytest.MonkeyPatch) -> Libc:
    found = Libc(4 * PAGE)
    monkeypatch.setattr(machine_memory, "_libc", lambda: found)
    return found


def test_a_limit_is_named(libc: Libc, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: Any = SimpleNamespace(
        getrlimit=lambda which: (8 << 20, 8 << 20), RLIMIT_MEMLOCK=0, RLIM_INFINITY=-1
    )
    monkeypatch.setitem(__import__("sys").modules, "resource", limits)
    found = lock([(PAGE, PAGE), (8 * PAGE, 9 * PAGE)])
    assert found == Lock(
        ((PAGE, PAGE),), "the limit is 8.00 MiB (ulimit -l); ulimit -l unlimited raises it"
    )
    unlock(found.ranges)
    assert libc.locked == {}


def test_a_system_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "_libc", lambda: None)
    assert lock([(PAGE, PAGE)]).problem == "this system has no mlock"
    unlock([(PAGE, PAGE)])


def test_the_system_locks() -> None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and limit < 4 * PAGE:
        pytest.skip("hardly any memory may be locked")
    memory = mmap.mmap(-1, 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    found = lock([(address, 2 * PAGE)])
    assert found == Lock(((address, 2 * PAGE),))
    unlock(found.ranges)
