"""`DraftPace`: how far a draft model should go, whose guesses take time, too.

How often guesses of some probability are right is measured, and so is what rows cost; a guess is
worth it if the steps that it is likely to save are more. What drafts cost in all, and what they
saved, is kept account of: where they don't pay there are none, but for a small share of the time,
in which it would show if they did again. Neither a debt nor a credit grows without end, and what
others on the machine make a batch take is no debt: steps without drafts lose as much by them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from localkv.engine.speculation.drafter import MOST_SURE
from localkv.engine.speculation.pace import Pace
from localkv.engine.speculation.prices import Prices
from localkv.kernels.guessing import Guessing

_BOUNDS = (
    *(0.5, 0.65, 0.75, 0.82, 0.87, 0.91, 0.94, 0.96, 0.975, 0.985, 0.99, 0.994),
    *(0.997, 0.9985, 0.9995),
)
"""Probabilities between the levels of confidence, 1 to `MOST_SURE`."""
_PRIOR_TESTS = 4.0
_LOSS, _HOPEFUL_LOSS = 0.004, 0.02
"""Of the time without drafts, that makes up for what drafts have cost more than they saved; where
they should pay by all that was measured, and had bad luck."""
_MOST_LOST = 5.0
"""Steps that they may have cost more than they saved."""
_CREDIT = 8.0
"""Steps that were saved count against as many that are lost later, at most."""
_COMPARED = 48
"""Drafts after which a step without one is timed."""
_REFRESHED = 8
"""Drafts after which it is worked out anew how far they should go; sooner if a guess was wrong."""
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
        self._rows = 1
        self._n_drafts = self._age = 0
        self._has_drafted = False
        self._guessing: Guessing | None = None
        self._should_pay = True

    @property
    def compares(self) -> bool:
        """Whether a step without a draft should be timed now, to see what it takes."""
        return self._n_drafts >= _COMPARED

    def may_draft(self, reading: float = 0.0) -> bool:
        """Whether drafts have not cost too much so far.

        Args:
            reading: seconds that it takes the draft to read what it lacks of the text.
        """
        return self._lost + reading <= _MOST_LOST * self.prices.one

    def tokens_to_rest(self, reading: float) -> int:
        """Without drafts, until there may be some."""
        one = self.prices.one
        missing = self._lost + reading - _MOST_LOST * one
        return int(missing / (self._share() * one)) + 1 if one else 1

    def guessed(self, confidence: int, *, right: bool) -> None:
        """As `Pace.guessed`."""
        super().guessed(confidence, right=right)
        if not right:
            self._guessing = None

    def guessing(
        self,
        most: int,
        n_rows: int,
        seconds: float,
        n_vocab: int,
        p_min: float,
        overhead: float = 0.0,
    ) -> Guessing:
        """How far a draft should go: a guess should be followed by another one if that is likely to
        save more than it takes.

        Args:
            most: guesses at most.
            n_rows: that are evaluated anyway.
            seconds: what each guess takes.
            n_vocab, p_min: as `Guessing` has them.
            overhead: seconds of a draft besides those of its guesses.
        """
        known, self._age = self._guessing, self._age + 1
        if known is not None and self._age < _REFRESHED and self._rows == n_rows:
            same = known.most == most and known.n_vocab == n_vocab and known.p_min == p_min
            if same:
                return known
        one, steps = self.prices.one, self.prices.steps
        guess = seconds / one if one else 0.0
        prices = [steps(n_rows + n) for n in range(1, most + 1)]
        least = [_MARGIN * (guess + max(0.0, after - price)) for price, after in pairwise(prices)]
        chances = [self._chance(level) for level in range(1, MOST_SURE + 1)]
        self._rows, self._age = n_rows, 0
        self._should_pay = self._pays(
            [price - steps(n_rows) + guess * (n + 1) for n, price in enumerate(prices)],
            overhead / one if one else 0.0,
        )
        self._guessing = Guessing(most, n_vocab, p_min, _BOUNDS, chances, (*least, 1.0))
        return self._guessing

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

    def read(self, seconds: float) -> None:
        """It took the draft so long to read what it lacked of a text."""
        self._lost += seconds

    def drafted(self, seconds: float) -> None:
        """Guesses took so long."""
        self._lost += seconds
        self._n_drafts += 1
        self._has_drafted = True

    def measured(self, n_rows: int, seconds: float) -> None:
        """A batch of rows took so long; the first of its size says nothing."""
        if self._has_drafted:  # what a step needs has left the processor's caches meanwhile
            self._is_after_drafts = True
        is_plain = n_rows == 1 and not self._is_after_drafts
        if n_rows == 1 or self.prices.is_warm(n_rows):
            super().measured(n_rows, seconds)
        else:
            self.prices.measured(n_rows, seconds)
        if is_plain:
            self._n_drafts = 0
        self._is_after_drafts |= self._has_drafted
        self._has_drafted = False

    def spent(self, n_rows: int, seconds: float, *, n_texts: int = 1, n_drafted: int = 1) -> None:
        """As `Pace.spent`, for texts that are alone when they have drafts."""
        one, seconds = self.prices.one, self.prices.usual(n_rows, seconds)
        if n_texts == 1 and (n_rows > 1 or self._is_after_drafts):
            self._lost += seconds - (one or seconds)
        else:
            self._make_up(seconds / n_texts)
        self._is_after_drafts = n_rows > 1

    def rested(self, n_steps: int) -> None:
        """So many steps of a token each were not measured."""
        self._make_up(n_steps * self.prices.one)

    def saved(self) -> None:
        """A drafted token was right: one step less."""
        self._gain(self.prices.one)

    def _pays(self, prices: Sequence[float], overhead: float) -> bool:
        """Whether guesses of which the draft is most sure save more steps than they take.

        Args:
            prices: steps that 1, 2, ... guesses take.
            overhead: steps of a draft, however many they are.
        """
        chance, likely, saved = self._chance(MOST_SURE), 1.0, 0.0
        for price in prices:
            likely *= chance
            saved += likely
            if saved > _MARGIN * (price + overhead):
                return True
        return False

    def _share(self) -> float:
        return _HOPEFUL_LOSS if self._should_pay else _LOSS

    def _make_up(self, seconds: float) -> None:
        """So long there were no drafts."""
        self._gain(self._share() * seconds)

    def _gain(self, seconds: float) -> None:
        self._lost = max(self._lost - seconds, min(self._lost, -_CREDIT * self.prices.one))
