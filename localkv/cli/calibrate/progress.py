"""How far `localkv calibrate` is, and how long it will take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median

from localkv.cli.output.messages import say
from localkv.cli.output.progress_line import ProgressLine

BEFORE_ESTIMATE = 40
"""Steps before time is estimated: with the first ones kernels of all types are compiled."""
LATEST = 20
"""Steps that tell how long one takes."""
LONG = 120
"""Seconds that are worth a line."""


class CalibrateProgress(ProgressLine):
    """A line on a terminal, else one at the start.

    Attributes:
        seconds: since it was made.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._started = clock()
        self._latest = deque[float]([self._started], LATEST + 1)
        self._told = False

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    def step(self, done: int, of: int, what: str) -> None:
        """Tell what is next, when so many of all steps are done."""
        times = self._latest
        if done:
            times.append(self._clock())
        estimate = ""
        if done >= BEFORE_ESTIMATE:
            each = median(b - a for a, b in pairwise(times))
            left = each * (of - done)
            estimate = f", about {left:.0f} s left"
            self._tell(of - done, left)
        if what:
            self.show(f"{done} of {of}: {what}{estimate}")

    def _tell(self, steps: int, left: float) -> None:
        if not self._told and left > LONG:
            self.clear()
            say(
                f"{steps} more measurements take about {left / 60:.0f} minutes; fewer tokens "
                "(--tokens) or types (--types) take less"
            )
        self._told = True
