"""`Pace`: how many drafted tokens are worth their rows, from what was measured so far.

Whether a guess is right shows with the next token, evaluated as a draft or not. So a drafter proves
itself at no cost, and its drafts cost nothing as long as it is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from localkv.engine.speculation.prices import Prices

SIZES = (1, 3, 7, 15, 31, 63)
"""Tokens that are drafted together: few, as a batch of a new size takes long the first time."""

_PRIOR_TESTS = 2.0
"""Guesses that what is assumed at the start counts as."""
_FORGETS = 0.97
"""Per guess: a text may begin to repeat itself, or cease to."""
_WEIGHTS = tuple((away, 0.5 ** abs(away)) for away in range(-2, 3))
"""What a guess counts for, by how many levels of confidence it is away."""
_MARGIN = 1.1
"""Drafts must promise to be so much faster."""
_REFRESHED = 16
"""Decisions after which prices are looked at again."""
_NO_CHANCE = 0.02
"""Further tokens are right so seldom that they are not looked at."""
_CLOSE = 0.6
"""The share of the chance that the first token needs: with less only some are looked at."""
_LOSS = 0.01
"""Drafts may cost this share of the time more than they save."""
_LOST_STEPS, _LIKELY = 3.0, 0.5
"""Drafts may cost this many steps more if the first is right with this chance or a higher one."""


class Pace:
    """Chooses the number of tokens to draft for one text.

    Attributes:
        prices: of batches.
    """

    def __init__(self, prices: Prices | None = None) -> None:
        self.prices = prices or Prices()
        self._tests = [_PRIOR_TESTS] * (MOST_SURE + 1)
        self._hits = [_PRIOR_TESTS * n / (n + 10) for n in range(MOST_SURE + 1)]
        self._spent = self._lost = 0.0
        self._n_texts = 1
        self._is_after_drafts = False
        self._least, self._age = 0.0, 0

    def guessed(self, confidence: int, *, right: bool) -> None:
        """A guess was right or wrong; others count less, the less alike they are."""
        tests, hits = self._tests, self._hits
        for away, weight in _WEIGHTS:
            level = confidence + away
            if 0 < level <= MOST_SURE:
                kept = 1 - (1 - _FORGETS) * weight
                tests[level] = kept * tests[level] + weight
                hits[level] = kept * hits[level] + weight * right

    def measured(self, n_rows: int, seconds: float) -> None:
        """A batch of rows took so long."""
        is_plain = n_rows == 1 and not self._is_after_drafts
        self.spent(n_rows, seconds)
        if n_rows > 1 or is_plain or not self.prices.one:
            self.prices.measured(n_rows, seconds)

    def spent(self, n_rows: int, seconds: float, *, n_texts: int = 1, n_drafted: int = 1) -> None:
        """Count the seconds that a batch took, without changing `prices`.

        Args:
            n_rows: rows of the batch: 1, or more with drafts.
            n_texts: texts that share the batch.
            n_drafted: texts with drafts among them.
        """
        self._n_texts = n_texts
        seconds = self.prices.usual(n_rows, seconds)
        self._spent += seconds / n_texts
        if n_rows > 1 or self._is_after_drafts:  # a step that follows drafts takes longer, too
            self._lost += max(0.0, seconds - (self.prices.one or seconds)) / n_drafted
        self._is_after_drafts = n_rows > 1
        if n_rows > 1:
            self._age = 0

    def rested(self, n_steps: int) -> None:
        """Take note of steps that were not measured, each with one token and no drafts."""
        self._spent += n_steps * self.prices.one

    def saved(self) -> None:
        """A drafted token was right: one step less, or the text's share of one."""
        self._lost = max(0.0, self._lost - self.prices.one / self._n_texts)

    def worth(self, confidence: int, most: int, *, missing: int = 0, others: int = 0) -> int:
        """How many of at most `most` tokens should be drafted, perhaps none.

        Args:
            confidence: in the first of them.
            missing: rows that are to be evaluated in addition to the next token's.
            others: texts that share the step: what it takes longer is time of all of them.
        """
        if others + 1 != self._n_texts:
            self._n_texts, self._age = others + 1, 0
        chance = self._chance(confidence)
        if chance < self._least_chance(most) or not self._may_lose(chance):
            return 0
        expected, best, best_gain = 1.0 + chance, 0, _MARGIN
        alone = self.prices.steps(1 + missing)
        for n in range(1, most + 1):
            if n in SIZES:
                longer = self.prices.steps(1 + missing + n) / alone - 1
                gain = expected / (1 + self._n_texts * longer)
                if gain > best_gain:
                    best, best_gain = n, gain
            chance *= self._chance(min(confidence + n, MOST_SURE))
            if chance < _NO_CHANCE:
                break
            expected += chance
        return best

    def is_close(self, confidence: int) -> bool:
        """Whether a guess would have to be not much surer to be worth it."""
        return self._chance(confidence) >= _CLOSE * self._least

    def _least_chance(self, most: int) -> float:
        """The chance of the first token, roughly; with less no number of guesses is worth it."""
        if not self._age:
            bounds = [
                (_MARGIN * (1 + self._n_texts * (self.prices.steps(1 + n) - 1)) - 1) / n
                for n in SIZES
                if n <= most
            ]
            self._least, self._age = min(bounds, default=2.0), _REFRESHED
        self._age -= 1
        return self._least

    def _chance(self, confidence: int) -> float:
        return self._hits[confidence] / self._tests[confidence]

    def _may_lose(self, chance: float) -> bool:
        """Whether there may be drafts, if the first is right with this chance."""
        steps = _LOST_STEPS if chance >= _LIKELY else 0.0
        return self._lost <= _LOSS * self._spent + steps * self.prices.one / self._n_texts


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
        """At most `most` tokens that may follow."""
        ...


MOST_SURE = 16
