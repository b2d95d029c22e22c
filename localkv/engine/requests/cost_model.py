"""How long a step takes, learned from those that were run.

A step's time is modelled as a sum: a constant, a time for each sequence that generates a token,
one for each token of a prompt, and one for each row of K and V that is read. The coefficients are
fitted by recursive least squares with forgetting (Haykin, *Adaptive Filter Theory*, ch. 10), so
that they follow a machine that gets busier.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FORGETTING = 0.95
"""What a step counts less with each one after it."""
SURE = 50.0
"""How far, in squared milliseconds, the first guess may be from the truth."""
WILD = 4.0
"""A step that took so many times as long as expected counts as one of so many times."""
ROWS = 1000.0
"""Rows of K and V that the last coefficient is about."""


@dataclass(frozen=True)
class StepShape:
    """What a step evaluates.

    Attributes:
        n_generating: sequences that generate a token each.
        n_prompt: tokens of prompts.
        n_rows: rows of K and V that these read, of all sequences together.
    """

    n_generating: int
    n_prompt: int
    n_rows: int

    @property
    def features(self) -> NDArray[np.float64]:
        return np.array([1.0, self.n_generating, self.n_prompt, self.n_rows / ROWS])


@dataclass
class CostModel:
    """Milliseconds of a step.

    Attributes:
        first_guess: of a step, of a generated token beside others, of a prompt's token, and of
            1,000 rows of K and V.
    """

    first_guess: tuple[float, float, float, float] = (20.0, 2.0, 2.0, 1.0)
    n_steps: int = 0
    _weights: NDArray[np.float64] = field(init=False)
    _spread: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self._weights = np.array(self.first_guess)
        self._spread = np.diag(SURE * np.square(self.first_guess))

    @property
    def weights(self) -> NDArray[np.float64]:
        """The coefficients; none is below a thousandth of a millisecond."""
        return np.maximum(self._weights, 1e-3)

    def milliseconds(self, shape: StepShape) -> float:
        """What a step is expected to take."""
        return float(self.weights @ shape.features)

    def prompt_tokens(self, shape: StepShape, milliseconds: float) -> int:
        """Tokens of prompts that a step may have besides `shape` to take so long."""
        left = milliseconds - self.milliseconds(shape)
        return max(0, int(left / self.weights[2]))

    def learn(self, shape: StepShape, milliseconds: float) -> None:
        """Take in what a step took."""
        expected = self.milliseconds(shape)
        if self.n_steps:
            milliseconds = min(milliseconds, WILD * expected)
        self.n_steps += 1
        x = shape.features
        spread = self._spread @ x
        gain = spread / (FORGETTING + x @ spread)
        self._weights += gain * (milliseconds - self._weights @ x)
        self._spread = (self._spread - np.outer(gain, spread)) / FORGETTING
        # nothing is forgotten of what no step was about
        np.clip(self._spread, -1e6, 1e6, out=self._spread)
