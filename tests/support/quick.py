"""Long lists of cases, of which a quick run takes a few."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet


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
