"""Types within a budget against brute force."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.quality.kv_profile import Choice, frontier, within

CHOICES = st.builds(Choice, st.integers(0, 40).map(lambda n: 4 * n), st.floats(0, 10, width=16))
ITEMS = st.lists(st.lists(CHOICES, min_size=1, max_size=4), min_size=1, max_size=5)


@given(ITEMS, st.integers(0, 900))
def test_the_best_of_all_within_a_budget(items: list[list[Choice]], budget: int) -> None:
    every = [(sum(c.size for c in pick), sum(c.cost for c in pick)) for pick in product(*items)]
    fitting = [cost for size, cost in every if size <= budget]
    found = within(frontier(items), budget)
    if not fitting:
        assert found is None
        return
    assert found is not None
    picked = [item[choice] for item, choice in zip(items, found.choices, strict=True)]
    assert found.size == sum(choice.size for choice in picked) <= budget
    assert found.cost == pytest.approx(sum(choice.cost for choice in picked))
    assert found.cost == pytest.approx(min(fitting))


@given(ITEMS)
def test_larger_picks_cost_less(items: list[list[Choice]]) -> None:
    picks = frontier(items)
    assert all(a.size < b.size and a.cost > b.cost for a, b in pairwise(picks))


def test_an_item_without_choices_is_an_error() -> None:
    with pytest.raises(ValueError, match="no choice"):
        frontier([[Choice(1, 1.0)], []])
