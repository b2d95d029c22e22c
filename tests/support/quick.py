"""Long lists of cases, of which a quick run takes a few."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet

LIKE_OTHERS = {"iq1_s", "iq1_m", "iq2_xxs", "iq2_s", "iq3_s"}
"""Weight types whose kernels take long to compile, and are made as those of iq2_xs and iq3_xxs."""


def quick_types(names: Iterable[str]) -> list[ParameterSet]:
    """All types, slow where a quick run has another one that is like it."""
    names = list(names)
    return quick(names, [name for name in names if name not in LIKE_OTHERS])


def quick(cases: Iterable[Any], few: Collection[Any]) -> list[ParameterSet]:
    """What `parametrize` takes: all cases, slow but for a few; a tuple is several arguments."""
    cases = list(cases)
    assert all(case in cases for case in few)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in few else pytest.mark.slow,
        )
        for case in cases
    ]
