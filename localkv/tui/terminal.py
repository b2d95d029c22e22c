"""The terminal around the screen: no control character reaches it, and its end is noticed.

Widgets show control characters of answers and names where they expect them. `ControlFilter` is the
last thing that every line of the screen goes through, and drops those that widgets miss: neither
Textual nor Rich holds them back.

SIGHUP tells that the terminal was closed, but not where it is ignored (nohup) or nobody sends it.
Then Textual goes on: its thread that reads keys finds an end of input and reads again, and the one
that writes ends with an error, after which the screen's own thread waits for ever as soon as 30
pieces are to be written.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from localkv.system.terminal_text import without_controls


class ControlFilter(LineFilter):
    """Drops control characters, and links that the terminal itself would open."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(_is_harmless(segment) for segment in segments):
            return segments
        return list(map(_harmless, segments))


def _is_harmless(segment: Segment) -> bool:
    text, style, _ = segment
    return text.isprintable() and (style is None or style.link is None)


def _harmless(segment: Segment) -> Segment:
    text, style, control = segment
    kept = without_controls(text)
    kept += " " * (cell_len(text) - cell_len(kept))
    return Segment(kept, style.update_link(None) if style else None, control)


GRACE_SECONDS = 12.0
"""How long the end may take: another chat may be writing to the file of sessions (`PATIENCE`)."""
PAUSE_SECONDS = 1.0
"""Between looks at a terminal that the system can't wait for (macOS)."""
EXIT_CODE = 129
"""The exit code that shells report for a program that SIGHUP ended."""


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
