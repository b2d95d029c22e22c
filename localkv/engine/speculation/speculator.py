"""`Speculator` drafts for one generation, as many tokens as are worth their rows.

`Prices` knows what batches of several rows cost, compared with one. `Pace` finds how many drafted
tokens are worth that, from what was measured so far. Whether a guess is right shows with the next
token, evaluated as a draft or not. So a drafter proves itself at no cost, and its drafts cost
nothing as long as it is wrong.

Where guesses are far from being worth it, a speculator looks at a text only now and then, at some
tokens together. What is seldom run finds nothing of its own in the processor's caches. Then the
look takes longer than the guesses that it may miss are worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from localkv.engine.speculation.config import Speculation

_ROW, _FIRST_ROW = 0.15, 0.05
"""The share of a step that a further row costs, and one of the first `_TOGETHER`, before it was
measured. On 2 cores with 1.5B weights of 4 bits, 4 rows take 1.22 steps and 8 take 2.07."""
_TOGETHER = 4
"""Rows that products take together. A batch of a size that was not measured counts as one with as
many of them, so that it is tried."""
_SMOOTHED = 0.2
"""Weight of a new measurement."""
OUTLIER = 1.25
"""A batch counts as at most this many times its usual time."""
_DOUBT = 0.02
"""The share of what is too much that a price loses where it forbids all batches."""
_STEPS = 3
"""Steps of one row that are measured before it is known what one takes, at first: the shortest."""
_FIRST = 4
"""Rows beside the others' that a first batch of guesses has at most."""
_REMADE = 16
"""Measurements after which the table of prices is made again."""


def _guess(n_rows: int) -> float:
    few = min(n_rows, _TOGETHER)
    return 1 + _FIRST_ROW * (few - 1) + _ROW * (n_rows - few)


class Prices:
    """What an engine's batches take by their number of rows, which all its generations measure.

    A batch of several rows is compared with steps of one row at the same time. Both take longer
    while something else runs on the machine, and with a longer context.

    Args:
        guess: the price of a number of rows, in steps of one row, before it was measured.

    Attributes:
        one: seconds of a step of one row, smoothed; 0 before it was measured.
        known: prices of numbers of rows, in such steps, smoothed.
    """

    def __init__(self, guess: Callable[[int], float] = _guess) -> None:
        self.one = 0.0
        self.known = dict[int, float]()
        self._table = dict[int, float]()
        self._age = 0
        self._is_warm: set[int] = set()
        self._n_steps = _STEPS
        self._guess = guess

    @property
    def knows_step(self) -> bool:
        """Whether it is known what a step of one row takes."""
        return self.one > 0 and self._n_steps in (0, _STEPS)

    def is_warm(self, n_rows: int) -> bool:
        """Whether there was a batch of this size before."""
        return n_rows in self._is_warm

    def measured(self, n_rows: int, seconds: float) -> None:
        """A batch took so long.

        The first one of its size says nothing, and an outlier counts as a third more than was
        known.
        """
        if n_rows not in self._is_warm:
            self._is_warm.add(n_rows)
        elif n_rows == 1 and self._n_steps:
            self._n_steps -= 1
            self.one = min(self.one or seconds, seconds)
        elif n_rows == 1:
            self.one = smoothed(self.one, seconds)
        elif self.one:
            self._age += n_rows in self.known
            self.known[n_rows] = smoothed(self.known.get(n_rows, 0.0), seconds / self.one)
            if self._age % _REMADE == 0 or n_rows not in self._table:
                self._table.clear()

    @property
    def most_rows(self) -> int:
        """Guesses to try together: twice as many as were measured."""
        return max(_FIRST, 2 * max(self.known, default=0))

    def compared(self, n_rows: int, seconds: float, one: float) -> None:
        """A batch took so long, and a step of one row right beside it `one`: this is its price."""
        self._is_warm |= {1, n_rows}
        self._n_steps = 0
        self.one = self.one or one
        self.known[n_rows] = seconds / one
        self._table.clear()

    def doubt(self) -> None:
        """No batch was worth it: what is known may be of a time at which others used the machine,
        and is soon forgotten if it is not measured again."""
        for n_rows, price in self.known.items():
            self.known[n_rows] = price + _DOUBT * (min(price, self._guess(n_rows)) - price)
        self._table.clear()

    def usual(self, n_rows: int, seconds: float) -> float:
        """What a batch took, but for what others who use the machine took of it: steps of a row
        lose as much by them, unseen."""
        price = self.known.get(n_rows) if n_rows > 1 else 1.0
        if not self.one or price is None:
            return seconds
        return min(seconds, OUTLIER * price * self.one)

    def steps(self, n_rows: int) -> float:
        """The price of a batch, in steps of one row; a larger batch's price if that was quicker."""
        if n_rows == 1 or not self.known:
            return self._guess(n_rows)
        price = self._table.get(n_rows)
        if price is None:
            price = self._table[n_rows] = self._price(n_rows)
        return price

    def _price(self, n_rows: int) -> float:
        known = self.known
        prices = [price for n, price in known.items() if n >= n_rows]
        if n_rows not in known:
            below = max((n for n in known if n < n_rows), default=1)
            if below == 1:
                prices.append(self._guess(n_rows))
            else:
                price = self.steps(below)
                if (n_rows - 1) // _TOGETHER > (below - 1) // _TOGETHER:
                    price += max(_FIRST_ROW, (price - 1) / (below - 1)) * (n_rows - below)
                prices.append(price)
        return min(prices)


def smoothed(before: float, new: float) -> float:
    """What is known after a measurement; 0 is nothing."""
    return before + _SMOOTHED * (min(new, 4 / 3 * before) - before) if before else new


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

    def priced(self, prices: Prices) -> None:
        """These are the prices of the next batch."""
        self.pace.prices = prices

    def measured(self, n_rows: int, seconds: float) -> None:
        """Take note of a batch, as `Pace.measured` has it."""
        self.pace.measured(n_rows, seconds)

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
