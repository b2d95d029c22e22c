"""`Speculator`: drafts for one generation, and keeps count of what they are worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from localkv.engine.speculation.config import Speculation, one_text_at_a_time
from localkv.engine.speculation.drafter import Drafter
from localkv.engine.speculation.ngram import NgramDrafter
from localkv.engine.speculation.pace import Pace
from localkv.engine.speculation.prices import Prices


class Speculator:
    """Guesses tokens of a text while it is worth it.

    Args:
        prices: of the engine's batches, as far as they are known.
        drafter: None for the text itself.

    Attributes:
        pace: what was measured.
    """

    def __init__(
        self, config: Speculation, prices: Prices | None = None, drafter: Drafter | None = None
    ) -> None:
        self.config = config
        self.pace = Pace(prices)
        self._drafter = drafter or NgramDrafter()

    def begin(self, prompt: Iterable[int]) -> None:
        """Take note of a prompt."""
        for token in prompt:
            self._drafter.accept(token)

    def accept(self, token: int) -> None:
        """Take note of the text's next token, which proves or refutes a guess."""
        if confidence := self._drafter.confidence:
            self.pace.guessed(confidence, right=self._drafter.draft(1)[0] == token)
        self._drafter.accept(token)

    def draft(self, most: int, *, missing: int = 0, others: int = 0) -> Sequence[int]:
        """Tokens that should be evaluated with the next one; none if that would not be faster.

        Args:
            most: the text may have so many more, besides the next one.
            missing: rows that are to be evaluated besides the next token's.
            others: texts that share the step.
        """
        confidence = self._drafter.confidence
        if not confidence:
            return ()
        most = min(most, self.config.draft_max)
        worth = self.pace.worth(confidence, most, missing=missing, others=others)
        if worth < self.config.draft_min:
            return ()
        return self._drafter.draft(worth)


def new_speculator(config: Speculation, prices: Prices) -> Speculator | None:
    """What drafts for a new generation, or None.

    Raises:
        UsageError: a model should, which does so for a text alone (`ModelSpeculator`).
    """
    if config.drafter == "draft":
        raise one_text_at_a_time()
    return Speculator(config, prices) if config.is_on else None
