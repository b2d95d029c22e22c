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
        after: the grammar begins where the text has this; None for the text's beginning.
        openings: tokens that may come in the grammar's place at the text's beginning, each with
            what it takes to end what it opened: reasoning.
        repeats: text is free again after the grammar's end, until `after` is there once more;
            else the text ends with it.
        is_loose: text that does not keep to the grammar, right after the mark in the same token,
            leaves the text free: it was no mark. Else it is an error.
        skips_space: line breaks may come between the mark and the grammar.
    """

    after: re.Pattern[bytes] | None = None
    openings: dict[int, re.Pattern[bytes]] = field(default_factory=dict)
    repeats: bool = False
    is_loose: bool = False
    skips_space: bool = False


EVERYWHERE = Scope()


def mark(text: str) -> re.Pattern[bytes]:
    """A pattern that finds a text."""
    return re.compile(re.escape(text.encode()))
