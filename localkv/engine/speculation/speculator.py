"""`Speculator`: drafts for one generation, and keeps count of what they are worth.

Where guesses are far from being worth it, it looks at a text only now and then, at some tokens
together: what is seldom run finds nothing of its own in the processor's caches, and then the look
takes longer than the guesses that it may miss are worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.pace import MOST_SURE, Drafter, Pace
from localkv.engine.speculation.prices import Prices

LONGEST_PAUSE = 32
"""Tokens between two looks, at most; each look in vain doubles them."""
MOST_JUDGED = 16
"""A look compares this many of the newest tokens, at most, with what would have been guessed."""
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
            most: tokens that the text may have after the next one.
            missing: rows that are to be evaluated in addition to the next token's.
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


_BITS = 32
_TWO, _THREE, _SIX = ((1 << _BITS * size) - 1 for size in (2, 3, 6))
"""Masks for runs of 2, 3 and 6 tokens. A run is one number, quick to make: its ids are digits."""


class NgramDrafter:
    """Drafts what followed the last tokens when they came up before.

    Attributes:
        confidence: how many of the last tokens were there before, up to `MOST_SURE`.
    """

    def __init__(self) -> None:
        self.confidence = 0
        self._ids: list[int] = []
        self._two, self._three, self._six = dict[int, int](), dict[int, int](), dict[int, int]()
        self._last = 0  # six tokens
        self._at: int | None = None

    def accept(self, token: int) -> None:
        """Take note of the text's next token."""
        ids, at, last = self._ids, self._at, self._last
        n = len(ids)
        if n > 5:  # the runs that end there now are followed by a token
            self._six[last] = n
        if n > 2:
            self._three[last & _THREE] = n
        if n > 1:
            self._two[last & _TWO] = n
        ids.append(token)
        self._last = (last << _BITS | token) & _SIX
        if at is not None and self.confidence > 5 and ids[at] == token:
            self._at = at + 1
            self.confidence = min(self.confidence + 1, MOST_SURE)
        else:
            self._look_up()

    def _look_up(self) -> None:
        """Where the longest run that was there before goes on."""
        ids, last, matched = self._ids, self._last, 2
        n = len(ids)
        at = self._two.get(last & _TWO) if n > 1 else None
        if at is None:  # and so no longer one
            self._at, self.confidence = None, 0
            return
        three = self._three.get(last & _THREE) if n > 2 else None
        if three is not None:
            at, matched = three, 3
            six = self._six.get(last) if n > 5 else None
            if six is not None:
                at, matched = six, 6
        most = min(MOST_SURE, at)
        while matched < most and ids[at - matched - 1] == ids[n - matched - 1]:
            matched += 1
        self._at, self.confidence = at, matched

    def draft(self, most: int) -> list[int]:
        """At most `most` tokens that may follow: a run that reaches the end goes round."""
        at = self._at
        if at is None:
            return []
        known = self._ids[at : at + most]
        while len(known) < most:
            known += known[: most - len(known)]
        return known
