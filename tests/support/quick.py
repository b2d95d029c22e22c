"""Long lists of cases, of which a run takes some, and a quick run a few."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet

LIKE_OTHERS = {"iq1_s", "iq1_m", "iq2_xxs", "iq2_s", "iq3_s"}
"""Weight types whose kernels take long to compile, made as for iq2_xs and iq3_xxs."""


def quick_types(names: Iterable[str]) -> list[ParameterSet]:
    """All types, slow where a quick run has another one that is like it."""
    names = list(names)
    return quick(names, [name for name in names if name not in LIKE_OTHERS])


def quick(
    cases: Iterable[Any], few: Collection[Any], some: Collection[Any] | None = None
) -> list[ParameterSet]:
    """What `parametrize` takes: all cases, slow but for a few; a tuple is several arguments.

    What is neither among `some` (by default all are) nor a few of them is exhaustive.
    """
    cases = list(cases)
    some = cases if some is None else some
    assert all(case in cases for case in (*few, *some))

    def mark(case: Any) -> tuple[pytest.MarkDecorator, ...]:
        if case in few:
            return ()
        return (pytest.mark.slow if case in some else pytest.mark.exhaustive,)

    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark(case))
        for case in cases
    ]


def in_turn(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """One of each list at a time, begun again until all of the longest have had their turn."""
    n = max(map(len, lists))
    return [tuple(items[i % len(items)] for items in lists) for i in range(n)]
