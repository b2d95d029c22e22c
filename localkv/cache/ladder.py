"""A cache of so many bytes, whose pages take smaller types as it fills. No torch.

The pairs of types that pages go through are the *ladder*, each pair a *rung*. A page is stored in
the first; when the budget is full the oldest pages go down a rung, all of them before any goes
down the next, the newest and the one with a text's first tokens last (`cache/ladder_pool.py`).

Pages of all rungs lie in one *arena* for each layer, in *units*: the largest number of bytes that
the pages of all rungs are multiples of. So no byte of the budget is set apart for a type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from localkv.errors import UsageError
from localkv.formats import FORMATS, KV_FORMATS

if TYPE_CHECKING:
    from localkv.arch.spec import CacheGroup

Pair = tuple[str, str]
"""The types of K and of V."""

DEFAULT_LADDER: tuple[Pair, ...] = (
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    ("q8_0", "q4_0"),
    ("q4_0", "q4_0"),
)
MOST_RUNGS = 5
"""What one merge of attention's sums takes."""


def parse_ladder(text: str) -> tuple[Pair, ...]:
    """The pairs of a list as users write it: "f16,q8_0/q8_0,q8_0/q4_0"; a single type is both.

    Raises:
        UsageError: a type does not exist, or a step is not legal.
    """
    pairs = list[Pair]()
    for item in text.split(","):
        k, _, v = item.strip().partition("/")
        pairs.append((k, v or k))
    check_ladder(pairs)
    return tuple(pairs)


def ladder_text(pairs: Sequence[Pair]) -> str:
    """As `parse_ladder` reads it."""
    return ",".join(f"{k}/{v}" for k, v in pairs)


def ladder_pairs(ladder: str | Sequence[Pair] | None) -> tuple[Pair, ...]:
    """A ladder as users give it; None for the default.

    Raises:
        UsageError: as `parse_ladder`.
    """
    if ladder is None:
        return DEFAULT_LADDER
    if isinstance(ladder, str):
        return parse_ladder(ladder)
    pairs = tuple((k, v) for k, v in ladder)
    check_ladder(pairs)
    return pairs


def check_ladder(pairs: Sequence[Pair]) -> None:
    """Refuse pairs that pages can't go through one after the other.

    Raises:
        UsageError: names the type or the step, and types that work.
    """
    able = [name for name, fmt in KV_FORMATS.items() if fmt.repacks]
    for name in (name for pair in pairs for name in pair):
        if name not in KV_FORMATS:
            raise UsageError(
                f"the ladder has an unknown cache type {name!r}", hint=f"use {', '.join(able)}"
            )
        if name not in able:
            raise UsageError(
                f"pages can't change to or from {name} (the ladder {ladder_text(pairs)})",
                hint=f"use {', '.join(able)}",
            )
    if not 2 <= len(pairs) <= MOST_RUNGS:
        raise UsageError(
            f"a ladder has 2 to {MOST_RUNGS} pairs of types, not {len(pairs)}",
            hint=f"use {ladder_text(DEFAULT_LADDER)}",
        )
    for above, below in pairwise(pairs):
        bits = [[_bits(name) for name in pair] for pair in (above, below)]
        if above == below or any(b > a for a, b in zip(*bits, strict=True)):
            step = f"{above[0]}/{above[1]} to {below[0]}/{below[1]}"
            raise UsageError(
                f"the ladder's step from {step} saves nothing on K or on V",
                hint="each pair has to be smaller than the one before, on neither side larger",
            )
        if bits[0] == bits[1]:
            raise UsageError(
                f"{above[0]}/{above[1]} and {below[0]}/{below[1]} take the same memory",
                hint="leave one of them out of the ladder",
            )


def _bits(name: str) -> float:
    return KV_FORMATS[name].bits_per_value(64)


@dataclass(frozen=True)
class LadderSizes:
    """How an arena is divided.

    Attributes:
        unit: bytes, of one layer.
        units: of a page on each rung.
        n_units: that the arena has.
    """

    unit: int
    units: tuple[int, ...]
    n_units: int

    @classmethod
    def of(
        cls, group: CacheGroup, pairs: Sequence[Pair], budget: int, page_tokens: int, n_pages: int
    ) -> LadderSizes:
        """Of layers of a group.

        Args:
            budget: bytes of K and V of all layers together.
            n_pages: the most that are ever held; no more is taken than these need on the first
                rung.
        """
        pages = [page_tokens * group.n_kv_heads * row_bytes(group, pair) for pair in pairs]
        unit = math.gcd(*pages)
        units = tuple(n // unit for n in pages)
        n_units = budget // (len(group.layers) * unit)
        return cls(unit, units, min(n_units, n_pages * units[0]))

    @property
    def n_pages(self) -> int:
        """Pages that there is room for, all on the last rung."""
        return self.n_units // self.units[-1]

    def landing(self, free: int, n: int, highest: int = 0) -> int | None:
        """The highest rung, from `highest` on, on which `n` new pages fit in so many units."""
        rungs = range(highest, len(self.units))
        return next((rung for rung in rungs if n * self.units[rung] <= free), None)

    def rungs_of(self, n_tokens: int, page_tokens: int) -> list[int] | None:
        """The rungs of a text's pages once it has so many tokens, that came one by one; None if
        there is no room for them."""
        found: list[int] | None = []
        for found in self.growth(-(-n_tokens // page_tokens)):
            if found is None:
                return None
        return found

    def growth(self, n_pages: int) -> Iterator[list[int] | None]:
        """The rungs of a text's pages, with one page, with two, ...; None and the end where there
        is no room."""
        rungs = list[int]()
        for _ in range(n_pages):
            last = len(self.units) - 1
            spare = sum(self.units[rung] - self.units[last] for rung in rungs)
            free = self.n_units - sum(self.units[rung] for rung in rungs)
            landing = self.landing(free + spare, 1)
            if landing is None:
                yield None
                return
            while free < self.units[landing]:
                place = min(
                    (place for place, rung in enumerate(rungs) if rung < last),
                    key=lambda place: lowering_order(rungs[place], place),
                )
                free += self.units[rungs[place]] - self.units[rungs[place] + 1]
                rungs[place] += 1
            rungs.append(landing)
            yield list(rungs)


def lowering_order(rung: int, place: int) -> tuple[int, bool, int]:
    """The order in which pages go down: all of a rung first, the oldest first, and that of the
    first tokens last."""
    return rung, place == 0, place


def row_bytes(group: CacheGroup, pair: Pair) -> int:
    """Bytes of a token's row of K and V in one layer and KV head."""
    k, v = pair
    return FORMATS[k].row_bytes(group.key_dim) + FORMATS[v].row_bytes(group.value_dim)
