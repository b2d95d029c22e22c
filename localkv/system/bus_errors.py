"""SIGBUS: the system can't supply the bytes of a mapped file.

If a file shrinks while it is mapped, or its disk fails, this signal ends the process that reads the
missing part, at any place: Python can't handle it, since the instruction that failed is repeated
when a handler returns. Programs end with one line instead and exit code 1. A process that merely
imports localkv keeps its own signal handling.

There are two handlers (`bus_error_guard`). One is made by ctypes, which costs nothing, and is
enough while a single thread reads a header. The other is a few machine instructions that need
neither Python nor its lock, for threads that have none. Linux only: elsewhere the signal ends the
process as usual.
"""

from __future__ import annotations

import sys
from mmap import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localkv.system.bus_error_guard import BusErrorGuard

_SUPPORTED = sys.platform == "linux" and sys.maxsize > 1 << 32

_guard: BusErrorGuard | None = None
_wanted = False
_runs_native = False


def end_cleanly() -> None:
    """Let this process, a program of ours, end with a line where a mapped file fails it."""
    global _wanted
    _wanted = _SUPPORTED


def end_cleanly_from_threads() -> None:
    """If `end_cleanly` was called, end cleanly from threads without Python, too."""
    global _runs_native
    if _wanted and not _runs_native:
        _the_guard().use_machine_code()
        _runs_native = True


def watch(data: mmap, name: str) -> None:
    """Count a mapped file among those whose failure ends the process with a line.

    Args:
        data: the mapping, until it is closed.
        name: its name in the line.
    """
    if _wanted:
        line = f"error: {name}: the file shrank while it was in use, or its disk fails\n"
        _the_guard().add(data, line.encode(errors="replace"))


def _the_guard() -> BusErrorGuard:
    global _guard
    if _guard is None:
        from localkv.system.bus_error_guard import BusErrorGuard

        _guard = BusErrorGuard()
        _guard.use_python()
    return _guard
