"""One choice for each of several items, so that the sum of costs is least within a budget.

The multiple-choice knapsack problem, solved exactly by dynamic programming over sums of sizes, of
which only those are kept that no smaller sum of at most the same cost makes useless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Choice(NamedTuple):
    """What an item may be: its size, a whole number, and what it costs."""

    size: int
    cost: float


class Picked(NamedTuple):
    """The choice of each item by index, and the sums of sizes and of costs."""

    choices: tuple[int, ...]
    size: int
    cost: float


class _State(NamedTuple):
    size: int
    cost: float
    before: int
    choice: int


def frontier(items: Sequence[Sequence[Choice]]) -> list[Picked]:
    """The best picks for all budgets: growing sizes, falling costs.

    Raises:
        ValueError: an item has no choice.
    """
    if not all(items):
        raise ValueError("an item has no choice")
    unit = math.gcd(*(choice.size for item in items for choice in item)) or 1
    steps = [[_State(0, 0.0, 0, 0)]]
    for item in items:
        grown = [
            _State(state.size + choice.size // unit, state.cost + choice.cost, i, j)
            for i, state in enumerate(steps[-1])
            for j, choice in enumerate(item)
        ]
        steps.append(_useful(grown))
    return [_picked(steps, at, unit) for at in range(len(steps[-1]))]


def _useful(states: list[_State]) -> list[_State]:
    """Those that cost less than all that are no larger."""
    kept, least = list[_State](), math.inf
    for state in sorted(states):
        if state.cost < least:
            kept.append(state)
            least = state.cost
    return kept


def _picked(steps: list[list[_State]], at: int, unit: int) -> Picked:
    last = steps[-1][at]
    choices = []
    for step in reversed(steps[1:]):
        state = step[at]
        choices.append(state.choice)
        at = state.before
    return Picked(tuple(reversed(choices)), last.size * unit, last.cost)


def within(picks: Sequence[Picked], budget: float) -> Picked | None:
    """The best of a `frontier` whose size is at most `budget`; None if all are larger."""
    fitting = [pick for pick in picks if pick.size <= budget]
    return min(fitting, key=lambda pick: (pick.cost, pick.size), default=None)
