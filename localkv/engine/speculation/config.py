"""`Speculation`: how tokens are drafted. Imports no NumPy: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass

from localkv.errors import UsageError
from localkv.option_checks import unknown_name

DRAFTERS = ("none", "ngram", "draft", "mtp")
"""What drafts: nothing; the text itself, where its last tokens came up before; a smaller model; a
block of the model's own file that predicts a further token (multi-token prediction)."""

MOST_DRAFTED = 63
"""Tokens that are drafted together at most."""


MOST_BETWEEN = 7
"""Guesses after which recurrent layers keep states, at most: of models with large states one takes
tens of MiB."""

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
        draft_p_min: a model drafts no token that it finds less probable.

    Raises:
        UsageError: a value out of its range.
    """

    drafter: str = "none"
    draft_max: int = 15
    draft_min: int = 1
    draft_p_min: float = 0.0

    @property
    def is_on(self) -> bool:
        return self.drafter != "none"

    @property
    def n_between(self) -> int:
        """Guesses after which recurrent layers keep states, until it is known which are right."""
        return min(self.draft_max, MOST_BETWEEN) if self.is_on else 0

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS:
            raise unknown_name("unknown speculation", self.drafter, DRAFTERS)
        if not 1 <= self.draft_max <= MOST_DRAFTED:
            raise UsageError(f"draft_max must be from 1 to {MOST_DRAFTED}, not {self.draft_max}")
        if not 1 <= self.draft_min <= self.draft_max:
            raise UsageError(
                f"draft_min must be from 1 to draft_max ({self.draft_max}), not {self.draft_min}"
            )
        if not 0 <= self.draft_p_min <= 1:
            raise UsageError(f"draft_p_min must be from 0 to 1, not {self.draft_p_min}")


def check_head(has_head: bool, why: str) -> None:
    """Refuse to have a block of the model draft where there is none.

    Args:
        why: in words, if there is none.

    Raises:
        UsageError: says so.
    """
    if not has_head:
        raise UsageError(
            f"--spec mtp needs a block that predicts further tokens: {why}",
            hint="--spec ngram guesses with any model",
        )


def check_drafter(speculation: Speculation, model: object) -> None:
    """Refuse a drafter without the model that it needs, and a model without use.

    Args:
        model: the one that drafts, or None.

    Raises:
        UsageError: says which of them it is.
    """
    if speculation.drafter == "draft" and model is None:
        raise UsageError(
            "--spec draft needs a model that drafts",
            hint="-md FILE names one, with the tokenizer of the model",
        )
    if speculation.drafter != "draft" and model is not None:
        raise UsageError(
            f"-md names a model that drafts, but --spec is {speculation.drafter}",
            hint="leave out one of them: with -md, --spec is draft",
        )
