"""`Prices`: what batches of several rows cost, compared with one."""

from __future__ import annotations

from collections.abc import Callable

_ROW = 0.15
"""The share of a step that a further row costs, before it was measured. On 2 cores with 1.5B
weights of 4 bits, 4 rows take 1.22 steps and 8 take 2.07."""
_SMOOTHED = 0.2
"""Weight of a new measurement."""
OUTLIER = 1.25
"""A batch counts as at most this many times its usual time."""
_DOUBT = 0.02
"""The share of what is too much that a price loses where it forbids all batches."""
_REFRESHED = 16
"""Measurements after which the table of prices is made again."""


def _guess(n_rows: int) -> float:
    return 1 + _ROW * (n_rows - 1)


class Prices:
    """What an engine's batches take by their number of rows, which all its generations measure.

    A batch of several rows is compared with steps of one row at the same time: these take longer
    while something else runs on the machine, and with a longer context, and so does it.

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
        self._guess = guess

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
        elif n_rows == 1:
            self.one = smoothed(self.one, seconds)
        elif self.one:
            self._age += n_rows in self.known
            self.known[n_rows] = smoothed(self.known.get(n_rows, 0.0), seconds / self.one)
            if self._age % _REFRESHED == 0 or n_rows not in self._table:
                self._table.clear()

    def compared(self, n_rows: int, seconds: float, one: float) -> None:
        """A batch took so long, and a step of one row right beside it `one`: this is its price."""
        self._is_warm |= {1, n_rows}
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
                row = max(_ROW / 3, (price - 1) / (below - 1))
                prices.append(price + row * (n_rows - below))
        return min(prices)


def smoothed(before: float, new: float) -> float:
    """What is known after a measurement; 0 is nothing."""
    return before + _SMOOTHED * (min(new, 4 / 3 * before) - before) if before else new
