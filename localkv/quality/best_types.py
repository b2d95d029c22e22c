"""The types of all layers that cost least within budgets of bits, from what each costs alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from localkv.cache.layout import kv_values_per_token
from localkv.cache.profile import LayerTypes
from localkv.model import Transformer
from localkv.quality.calibration_plan import Key, Plan
from localkv.quality.layer_costs import BASE, base_types
from localkv.quant_formats import KV_FORMATS


def predicted(costs: Mapping[Key, float], types: LayerTypes) -> float:
    """The sum of what the types cost alone."""
    return sum(
        costs[layer, side, name]
        for layer, pair in enumerate(types)
        if pair is not None
        for side, name in enumerate(pair)
        if name != BASE
    )


def best_types(
    model: Transformer, plan: Plan, costs: Mapping[Key, float]
) -> list[tuple[LayerTypes, float]]:
    """The types of all layers with the least sum of costs for each budget, and the sum.

    A budget is left out if no types hold it, or if its types are the same as for a smaller budget.
    """
    items, owners = list[list[Choice]](), list[tuple[int, int, list[str]]]()
    for group in model.config.groups:
        for layer in group.layers:
            for side, dim in enumerate((group.key_dim, group.value_dim)):
                names = [n for n in plan.types if n == BASE or (layer, side, n) in costs]
                owners.append((layer, side, names))
                items.append(
                    [
                        Choice(
                            KV_FORMATS[name].row_bytes(dim) * group.n_kv_heads,
                            0.0 if name == BASE else costs[layer, side, name],
                        )
                        for name in names
                    ]
                )
    picks = frontier(items)
    n_values = kv_values_per_token(model.config)
    found = dict[Picked, None]()
    for bits in sorted(plan.budgets):
        best = within(picks, bits * n_values / 8)
        if best is not None:
            found[best] = None
    lists = []
    for pick in found:
        types = base_types(model)
        for (layer, side, names), choice in zip(owners, pick.choices, strict=True):
            types = changed(types, layer, side, names[choice])
        lists.append((types, pick.cost))
    return lists


def changed(types: LayerTypes, layer: int, side: int, name: str) -> LayerTypes:
    """The types with another one of K (side 0) or V (1) of a layer."""
    pair = types[layer]
    assert pair is not None
    other = (name, pair[1]) if side == 0 else (pair[0], name)
    return (*types[:layer], other, *types[layer + 1 :])


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
    """The states that cost less than every other state that is no larger."""
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
