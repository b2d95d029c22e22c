"""`Speculator`: drafts for one generation, and keeps count of what they are worth.

Where guesses are far from being worth it, it looks at a text only now and then, at some tokens
together: what is seldom run finds nothing of its own in the processor's caches, and then the look
takes longer than the guesses that it may miss are worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.drafter import Drafter
from localkv.engine.speculation.ngram import NgramDrafter
from localkv.engine.speculation.pace import Pace
from localkv.engine.speculation.prices import Prices

LONGEST_PAUSE = 32
"""Tokens between two looks, at most; each look in vain doubles them."""
MOST_JUDGED = 16
"""Tokens, the last ones before a look, of which it matters whether they would have been guessed."""
MOST_CLOSE = 4
"""Looks at guesses that are nearly worth it, one after the other, that are not in vain yet."""


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
        self._unseen = list[int]()
        self._pause = 0
        self._n_close = 0

    @property
    def is_resting(self) -> bool:
        """Whether `draft` would look at nothing and give nothing."""
        return len(self._unseen) < self._pause

    def begin(self, prompt: Iterable[int]) -> None:
        """Take note of a prompt."""
        for token in prompt:
            self._drafter.accept(token)

    def accept(self, token: int) -> None:
        """Take note of the text's next token, which proves or refutes a guess."""
        self._unseen.append(token)

    def _look(self) -> int:
        """See what has come since the last look; how sure the drafter is of what comes next."""
        drafter, pace = self._drafter, self.pace
        confidence = drafter.confidence
        first_judged = len(self._unseen) - MOST_JUDGED
        for i, token in enumerate(self._unseen):
            if confidence and i >= first_judged:
                pace.guessed(confidence, right=drafter.draft(1)[0] == token)
            drafter.accept(token)
            confidence = drafter.confidence
        if self._pause:
            pace.rested(self._pause - 1)
        self._unseen.clear()
        return confidence

    def draft(self, most: int, *, missing: int = 0, others: int = 0) -> Sequence[int]:
        """Tokens that should be evaluated with the next one; none if that would not be faster.

        Args:
            most: the text may have so many more, besides the next one.
            missing: rows that are to be evaluated besides the next token's.
            others: texts that share the step.
        """
        if self.is_resting:
            return ()
        confidence, most = self._look(), min(most, self.config.draft_max)
        worth = 0
        if confidence:
            worth = self.pace.worth(confidence, most, missing=missing, others=others)
        is_close = not worth and confidence > 0 and self.pace.is_close(confidence)
        self._n_close = self._n_close + 1 if is_close else 0
        if worth or (is_close and self._n_close <= MOST_CLOSE):
            self._pause = 0
        else:
            self._pause = min(2 * self._pause or 1, LONGEST_PAUSE)
        return self._drafter.draft(worth) if worth >= self.config.draft_min else ()
