"""`DraftPace`: how far a draft model should go, whose guesses take time, too.

How often guesses of some probability are right is measured, and so is what rows cost; a guess is
worth it if the steps that it is likely to save are more. What drafts cost in all, and what they
saved, is kept account of: where they don't pay there are none, but for a small share of the time,
in which it would show if they did again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from localkv.engine.speculation.drafter import MOST_SURE
from localkv.engine.speculation.pace import Pace
from localkv.engine.speculation.prices import Prices

_BOUNDS = (
    *(0.5, 0.65, 0.75, 0.82, 0.87, 0.91, 0.94, 0.96, 0.975, 0.985, 0.99, 0.994),
    *(0.997, 0.9985, 0.9995),
)
"""Probabilities between the levels of confidence, 1 to `MOST_SURE`."""
_PRIOR_TESTS = 4.0
_LOSS = 0.01
"""Drafts may cost this share of the time more than they save,"""
_LOST_STEPS = 5.0
"""and so many steps more than this."""
_CREDIT_STEPS = 4.0
"""Steps that were saved count against as many that are lost later, at most."""
_MARGIN = 1.05
"""What is likely to be saved must be so many times what it costs."""


def confidence_of(probability: float) -> int:
    """A level for a guess that the draft gives this probability: finer the surer it is."""
    return 1 + bisect_right(_BOUNDS, probability)


class DraftPace(Pace):
    """Chooses how far a draft model goes, for one text."""

    def __init__(self, prices: Prices | None = None) -> None:
        super().__init__(prices)
        edges = (0.0, *_BOUNDS, 1.0)
        self._tests = [_PRIOR_TESTS] * (MOST_SURE + 1)
        self._hits = [0.0] + [_PRIOR_TESTS * (low + high) / 2 for low, high in pairwise(edges)]
        self._likely = self._guess = 0.0
        self._rows = 1

    def may_draft(self) -> bool:
        """Whether drafts have not cost too much so far."""
        return self._lost <= _LOSS * self._spent + _LOST_STEPS * self.prices.one

    def begin(self, n_rows: int, seconds: float) -> None:
        """A draft begins.

        Args:
            n_rows: that are evaluated anyway.
            seconds: what each guess after the first takes.
        """
        one = self.prices.one
        self._likely, self._rows = 1.0, n_rows
        self._guess = seconds / one if one else 0.0

    def goes_on(self, confidence: int, number: int) -> bool:
        """Whether a guess so sure, the draft's n-th, should be followed by another."""
        self._likely *= self._chance(confidence)
        steps, rows = self.prices.steps, self._rows + number
        return self._likely > _MARGIN * (self._guess + max(0.0, steps(rows + 1) - steps(rows)))

    def worthy(self, confidences: Sequence[int]) -> int:
        """How many of the guesses that were made should be evaluated, perhaps none."""
        steps, rows = self.prices.steps, self._rows
        likely, saved, best, best_gain = 1.0, 0.0, 0, 0.0
        for n, confidence in enumerate(confidences, 1):
            likely *= self._chance(confidence)
            saved += likely
            gain = saved - _MARGIN * (steps(rows + n) - steps(rows))
            if gain > best_gain:
                best, best_gain = n, gain
        return best

    def drafted(self, seconds: float) -> None:
        """Guesses took so long."""
        self._spent += seconds
        self._lost += seconds

    def measured(self, n_rows: int, seconds: float) -> None:
        """A batch of rows took so long; the first of its size says nothing."""
        if self.prices.is_warm(n_rows):
            super().measured(n_rows, seconds)
        else:
            self.prices.measured(n_rows, seconds)

    def saved(self) -> None:
        """A drafted token was right: one step less."""
        one = self.prices.one
        self._lost = max(-_CREDIT_STEPS * one, self._lost - one)
