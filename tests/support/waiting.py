"""Waits for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_for(
    what: Callable[[], object], why: str = "it did not happen", *, seconds: float = 90
) -> None:
    """Return once it is so; fail with the reason when it takes too long."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
