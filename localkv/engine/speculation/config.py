"""`Speculation`: how tokens are drafted. Imports no NumPy: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass

from localkv.errors import UsageError

DRAFTERS = ("none", "ngram")
"""What drafts: nothing, or the text itself, where its last tokens came up before."""

MOST_DRAFTED = 63
"""Tokens that are drafted together at most."""


RECORDING_LEFT = (
    "tokens are drawn on the host because some are guessed, and a step with guesses is launched "
    "kernel by kernel: on a GPU a seed may give other tokens than without"
)
"""What a user should know where the backend records its steps."""


@dataclass(frozen=True)
class Speculation:
    """How tokens are drafted.

    Attributes:
        drafter: one of `DRAFTERS`.
        draft_max: most tokens drafted at a time; how many are worth it is measured.
        draft_min: fewer are not worth it.

    Raises:
        UsageError: a value out of its range.
    """

    drafter: str = "none"
    draft_max: int = 15
    draft_min: int = 1

    @property
    def is_on(self) -> bool:
        return self.drafter != "none"

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS:
            raise UsageError(
                f"unknown speculation {self.drafter!r}", hint=f"use {', '.join(DRAFTERS)}"
            )
        if not 1 <= self.draft_max <= MOST_DRAFTED:
            raise UsageError(f"draft_max must be from 1 to {MOST_DRAFTED}, not {self.draft_max}")
        if not 1 <= self.draft_min <= self.draft_max:
            raise UsageError(
                f"draft_min must be from 1 to draft_max ({self.draft_max}), not {self.draft_min}"
            )
