"""Figures as the screen shows them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from textual.content import Content

from localkv.system.terminal_text import visible

EIGHTHS = " ▏▎▍▌▋▊▉█"
RISING = " ▁▂▃▄▅▆▇█"
LONGEST_TITLE = 200
"""Characters of a session's title that are shown."""


def size(n_bytes: float) -> str:
    """Bytes in a unit that leaves few digits."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if n_bytes >= factor:
            value = n_bytes / factor
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{n_bytes / 1024:.1f} KiB"


def bar(share: float, width: int, style: str) -> Content:
    """A partly filled bar, to an eighth of a cell."""
    share = min(max(share, 0.0), 1.0)
    whole, eighth = divmod(round(share * width * 8), 8)
    filled = "█" * whole + (EIGHTHS[eighth] if eighth else "")
    rest = "░" * (width - len(filled))
    return Content.assemble((filled, style), (rest, "$foreground 20%"))


def spread(left: Content | str, right: Content | str, width: int) -> Content:
    """Two texts at both ends of a line."""
    left, right = Content.from_text(left, markup=False), Content.from_text(right, markup=False)
    gap = max(1, width - left.cell_length - right.cell_length)
    return Content.assemble(left, " " * gap, right)


def columns(values: Iterable[float], width: int, height: int) -> list[str]:
    """The last values as columns from zero to the largest, the newest at the right, in rows."""
    shown = list(values)[-width:] if width > 0 else []
    largest = max(shown, default=0.0)
    levels = [max(1, round(8 * height * value / largest)) if largest else 1 for value in shown]
    blank = " " * (width - len(shown))
    return [
        blank + "".join(RISING[min(max(level - 8 * row, 0), 8)] for level in levels)
        for row in reversed(range(height))
    ]


def ago(then: float) -> str:
    """How long ago a time of `time.time` was, roughly."""
    seconds = max(0.0, time.time() - then)
    if seconds < 90:
        return "just now"
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            n = int(seconds // length)
            return f"{n} {unit}{'s' if n > 1 else ''} ago"
    raise AssertionError


def title_line(title: str) -> str:
    """A session's title on one line, however long and with any characters."""
    return visible(" ".join(title[:LONGEST_TITLE].split()))
