"""What any drafter does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Guesses how a text goes on."""

    def accept(self, token: int) -> None:
        """Take note of the text's next token."""
        ...

    @property
    def confidence(self) -> int:
        """How sure it is of the next token, from 0 (it has no guess) to `MOST_SURE`.

        Of the token after that it is one step surer, if it was right.
        """
        ...

    def draft(self, most: int) -> Sequence[int]:
        """At most so many tokens that may follow."""
        ...


MOST_SURE = 16
