"""`Speculation`: how tokens are drafted. Imports no NumPy: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localkv.errors import UsageError

if TYPE_CHECKING:
    from localkv.kernels.backend import Backend

DRAFTERS = ("none", "ngram")
"""What drafts: nothing, or the text itself, where its last tokens came up before."""

MOST_DRAFTED = 63
"""Tokens that are drafted together at most."""


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


def check_speculation(speculation: Speculation, backend: Backend, n_parallel: int = 1) -> None:
    """Refuse to speculate where tokens are drawn by recorded steps, or for several texts at a time.

    Raises:
        UsageError: says which of them it is.
    """
    if speculation.is_on and n_parallel > 1:
        raise UsageError(
            f"--spec {speculation.drafter} has no place among texts that are generated at the same "
            "time",
            hint="leave it out, or generate one at a time (n_parallel 1)",
        )
    if speculation.is_on and backend.records:
        raise UsageError(
            f"--spec {speculation.drafter} has no place on a GPU yet: it draws tokens one by one",
            hint="leave it out, or use --device cpu",
        )
