"""Noticing that the terminal was closed, whatever the screen's thread is at.

SIGHUP says so, but not where it is ignored (nohup) or nobody sends it. Then Textual goes on: its
thread that reads keys finds an end of input and reads again, and the one that writes ends with an
error, after which the screen's own thread waits for ever as soon as 30 pieces are to be written.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable

GRACE_SECONDS = 12.0
"""How long the end may take: another chat may be writing to the file of sessions (`PATIENCE`)."""
PAUSE_SECONDS = 1.0
"""Between looks at a terminal that the system can't wait for (macOS)."""
EXIT_CODE = 129
"""Of a program that SIGHUP ended, as shells count."""


def wait_for_end() -> None:
    """Return when the other end of the terminal is closed."""
    poll = select.poll()
    try:
        poll.register(sys.__stdin__.fileno(), 0)  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):
        return
    while not any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll()):
        time.sleep(PAUSE_SECONDS)


def when_terminal_ends(end: Callable[[], object]) -> None:
    """Call `end` from a thread of its own then, and end the process if nothing comes of it.

    Windows ends programs by itself.
    """

    def watch() -> None:
        wait_for_end()
        try:
            end()
            time.sleep(GRACE_SECONDS)
        finally:
            os._exit(EXIT_CODE)

    if hasattr(select, "poll"):
        threading.Thread(target=watch, name="terminal-end", daemon=True).start()
