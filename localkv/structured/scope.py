"""`Scope`: where in an answer a grammar holds."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MOST_SEARCHED = 512
"""Bytes at the end of a text that are searched for a mark."""


@dataclass(frozen=True)
class Scope:
    """Where a grammar begins to hold, and whether it does so again.

    Attributes:
        before: the text is free up to this, reasoning's end; None if it does not begin so.
        openings: tokens that may come first instead, each with what ends what it opened: reasoning.
            `before` is that, then.
        mark: the grammar holds after each of these, to its end, and the text is free elsewhere;
            None if all of the text keeps to the grammar, and ends with it. What goes on in the
            mark's token and does not keep to the grammar shows that it was no mark.
        skips_space: line breaks may come between `before` and the grammar.
    """

    before: re.Pattern[bytes] | None = None
    openings: dict[int, re.Pattern[bytes]] = field(default_factory=dict)
    mark: re.Pattern[bytes] | None = None
    skips_space: bool = False


EVERYWHERE = Scope()


def text_pattern(text: str) -> re.Pattern[bytes]:
    """A pattern that finds a text."""
    return re.compile(re.escape(text.encode()))
