"""Messages of the command line about itself: one plain line each, on stderr.

Everything but the result of a command goes through here, so stdout holds the result only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from localkv.option_names import nearest_name


def escaped(text: str) -> str:
    r"""`text` with line breaks and whatever could steer a terminal as \n, \x1b and so on."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """`text` with spaces for line breaks, and `escaped`."""
    return escaped(" ".join(text.splitlines()))


def say(text: str) -> None:
    """Print one line on stderr, which may be closed."""
    if sys.stderr is not None:
        print(one_line(text), file=sys.stderr, flush=True)


def note(text: str) -> None:
    say(f"note: {text}")


def warn(text: str) -> None:
    say(f"warning: {text}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or nothing."""
    nearest = nearest_name(name, known)
    return f"; did you mean {nearest}?" if nearest else ""
