"""How long a step takes, learned from those that were run.

A step's time is modelled as a sum: a constant, a time for each sequence that generates a token, one
for each token of a prompt, one for each row of K and V that is read, and one for each pair of a
prompt's token and a row that it attends to. The coefficients are fitted by least squares, in which
a step counts less the larger it is, and with each one after it, so that they follow a machine that
gets busier. Steps in a row are mostly alike, and tell the sum but not its parts: so the fit is
drawn a little towards a first guess, as many times as large as steps have been found to be (ridge
regression; Hoerl and Kennard 1970), and no part is negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FORGETTING = 0.95
"""What a step counts less with each one after it."""
DRAWN = 0.01
"""What a coefficient that is twice the guess, or none of it, costs: as one step with such a squared
relative error."""
LEAST = 0.01
"""The share of its guess that a coefficient is at least."""
SHORTEST = 1e-3
"""Milliseconds that a step counts as at least, whatever a clock says."""
WILD = 4.0
"""A step counts as at most this many times as long as expected."""
ROWS = 1000.0
"""Rows of K and V, and pairs, that the last coefficients are about."""


@dataclass(frozen=True)
class StepShape:
    """What a step evaluates.

    Attributes:
        n_generating: sequences that generate a token each.
        n_prompt: tokens of prompts.
        n_rows: rows of K and V that these read, of all sequences together.
        n_pairs: of a token of a prompt and a row that it attends to.
    """

    n_generating: int
    n_prompt: int
    n_rows: int
    n_pairs: int = 0

    @property
    def features(self) -> NDArray[np.float64]:
        rows, pairs = self.n_rows / ROWS, self.n_pairs / ROWS
        return np.array([1.0, self.n_generating, self.n_prompt, rows, pairs])


def pairs(n_tokens: int, n_held: int) -> int:
    """Pairs of a prompt's tokens after `n_held` others: each attends to all before it."""
    return n_tokens * n_held + n_tokens * (n_tokens + 1) // 2


@dataclass
class CostModel:
    """Milliseconds of a step.

    Attributes:
        first_guess: of a step, of a generated token beside others, of a prompt's token, of 1,000
            rows of K and V, and of 1,000 pairs.
        n_steps: that were learned from.
        weights: the same five, as learned, all above 0.
    """

    first_guess: tuple[float, float, float, float, float] = (20.0, 2.0, 2.0, 1.0, 0.5)
    n_steps: int = 0
    weights: NDArray[np.float64] = field(init=False)
    _gram: NDArray[np.float64] = field(init=False)
    _moment: NDArray[np.float64] = field(init=False)
    _taken: float = 0.0
    _guessed: float = 0.0

    def __post_init__(self) -> None:
        self.weights = np.array(self.first_guess)
        n = len(self.weights)
        self._gram, self._moment = np.zeros((n, n)), np.zeros(n)

    def milliseconds(self, shape: StepShape) -> float:
        """What a step is expected to take."""
        return float(self.weights @ shape.features)

    def prompt_tokens(self, milliseconds: float, n_held: int) -> int:
        """Tokens of a prompt, after `n_held` others, that take as long."""
        if milliseconds <= 0:
            return 0
        pair = self.weights[4] / ROWS
        one = self.weights[2] + pair * n_held  # n tokens: n * one + pair * n * n / 2
        return int(2 * milliseconds / (one + math.sqrt(one * one + 2 * pair * milliseconds)))

    def learn(self, shape: StepShape, milliseconds: float) -> None:
        """Take in what a step took."""
        expected, milliseconds = self.milliseconds(shape), max(milliseconds, SHORTEST)
        if self.n_steps:
            milliseconds = min(milliseconds, WILD * expected)
        self.n_steps += 1
        guess, x = np.array(self.first_guess), shape.features
        self._taken = FORGETTING * self._taken + milliseconds
        size = float(guess @ x)
        self._guessed = FORGETTING * self._guessed + size
        self._gram = FORGETTING * self._gram + np.outer(x, x) / size**2
        self._moment = FORGETTING * self._moment + x * (milliseconds / size**2)
        prior, drawn = guess * (self._taken / self._guessed), DRAWN / guess**2
        least = LEAST * prior
        gram, moment = self._gram + np.diag(drawn), self._moment + drawn * prior
        self.weights = least + _solved(gram, moment - gram @ least)


def _solved(gram: NDArray[np.float64], moment: NDArray[np.float64]) -> NDArray[np.float64]:
    """The w >= 0 with gram w = moment, where those that would be negative are 0."""
    found, free = np.zeros(len(moment)), np.ones(len(moment), bool)
    while free.any():
        some = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
        if some.min() >= 0:
            found[free] = some
            break
        free[np.flatnonzero(free)[some.argmin()]] = False
    return found
