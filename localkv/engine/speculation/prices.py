"""`Prices`: what batches of several rows cost, beside those of one."""

from __future__ import annotations

from collections.abc import Callable

_ROW = 0.15
"""Of a step: what a further row costs, before it was measured. Measured on 2 cores with 1.5B
weights of 4 bits, 4 rows take 1.22 steps and 8 take 2.07."""
_SMOOTHED = 0.2
"""Weight of a new measurement."""


def _guess(n_rows: int) -> float:
    return 1 + _ROW * (n_rows - 1)


class Prices:
    """Seconds of an engine's batches by their number of rows, which all its generations measure.

    Args:
        guess: the price of a number of rows, in steps of one row, before it was measured.

    Attributes:
        seconds: smoothed.
    """

    def __init__(self, guess: Callable[[int], float] = _guess) -> None:
        self.seconds: dict[int, float] = {}
        self._is_warm: set[int] = set()
        self._guess = guess

    @property
    def one(self) -> float:
        """Seconds of a step of one row; 0 before it was measured."""
        return self.seconds.get(1, 0.0)

    def is_warm(self, n_rows: int) -> bool:
        """Whether there was a batch of this size before."""
        return n_rows in self._is_warm

    def measured(self, n_rows: int, seconds: float) -> None:
        """A batch took so long.

        The first one of its size says nothing, and an outlier counts as a third more than was
        known.
        """
        before = self.seconds.get(n_rows)
        if n_rows not in self._is_warm:
            self._is_warm.add(n_rows)
        elif before is None:
            self.seconds[n_rows] = seconds
        else:
            new = min(seconds, 4 / 3 * before)
            self.seconds[n_rows] = before + _SMOOTHED * (new - before)

    def steps(self, n_rows: int) -> float:
        """The price of a batch, in steps of one row."""
        if not self.one or n_rows == 1:
            return self._guess(n_rows)
        known = self.seconds.get(n_rows)
        if known is not None:
            return known / self.one
        below = max(n for n in self.seconds if n < n_rows)
        if below == 1:
            return self._guess(n_rows)
        price = self.seconds[below] / self.one
        row = max(_ROW / 3, (price - 1) / (below - 1))
        return price + row * (n_rows - below)
