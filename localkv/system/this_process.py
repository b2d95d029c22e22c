"""How long this process has run, and when its search for garbage pauses.

The search takes a fifth of the time of an import of many modules.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

_IMPORTED = time.perf_counter()


def process_age() -> float:
    """Seconds since the start of the process, Python's own start included, to a hundredth on Linux.

    Where the system does not say, since this module was imported, which the program does first.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name may hold anything
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, IndexError, ValueError):
        return time.perf_counter() - _IMPORTED


@contextmanager
def uncollected() -> Iterator[None]:
    """Let Python look for no circles of garbage in a block that makes many objects and keeps
    most of them; also a decorator. Objects that nobody refers to are freed as ever."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
