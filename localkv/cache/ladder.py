"""A cache with a budget of bytes, whose pages take smaller types as it fills. No torch.

The pairs of types that pages go through are the *ladder*, each pair a *rung*. A page is stored in
the first. When the budget is full the oldest pages go down a rung, and all of them do before any
goes down the next. The newest page and the one with a text's first tokens go last
(`cache/ladder_pool.py`). A new page begins on a rung that takes others at most one further
(`LadderSizes.landing`). Pages with tokens of a tail or a sink (`cache/layout.py`) stay in the
first, which is f16. Only full pages go to types that pack several tokens together.

Pages of all rungs lie in one *arena* for each layer, in *units*: the largest number of bytes that
the pages of all rungs are multiples of. So no byte of the budget is reserved for one type.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from localkv.errors import UsageError
from localkv.option_checks import unknown_name
from localkv.quant_formats import FORMATS, FORMER_NAMES, KV_FORMATS, TYPES_LISTED, WHY_RENAMED

if TYPE_CHECKING:
    from localkv.arch.spec import CacheGroup

Pair = tuple[str, str]
"""The types of K and of V."""

DEFAULT_LADDER: tuple[Pair, ...] = (
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    ("q8_0", "q4_0"),
    ("q4_1c", "q4_0"),
    ("q4_1c128", "kv3_0"),
)
"""The pairs that pages go through if nobody names others. `Budgeted.cache` leaves the last one out
where heads are no multiple of 64."""
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
    """Write pairs as text that `parse_ladder` reads."""
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
            raise unknown_type("the ladder has an unknown cache type", name, able)
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
    if not stores_rows(*pairs[0]):
        raise UsageError(
            f"a ladder can't begin with {'/'.join(pairs[0])}, which packs several tokens together",
            hint="begin with types that pack each by itself, such as f16 or q8_0",
        )
    for above, below in pairwise(pairs):
        bits = [[_bits(name) for name in pair] for pair in (above, below)]
        larger = [side for side, a, b in zip("KV", *bits, strict=True) if b > a]
        if above == below or larger:
            step = f"{above[0]}/{above[1]} to {below[0]}/{below[1]}"
            does = f"makes {' and '.join(larger)} larger" if larger else "changes nothing"
            raise UsageError(
                f"the ladder's step from {step} {does}",
                hint="each pair has to be smaller than the one before, on neither side larger",
            )
        if bits[0] == bits[1]:
            raise UsageError(
                f"{above[0]}/{above[1]} and {below[0]}/{below[1]} take the same memory",
                hint="leave one of them out of the ladder",
            )


def unknown_type(what: str, name: str, known: Iterable[str] = KV_FORMATS) -> UsageError:
    """The error about a cache type that does not exist.

    Args:
        what: what it should name, such as "unknown cache type".
        known: the types that it could have been.
    """
    if name in FORMER_NAMES:
        return UsageError(f"{what} {name}: it is called {FORMER_NAMES[name]} now", hint=WHY_RENAMED)
    return unknown_name(what, name, known, TYPES_LISTED)


def stores_rows(type_k: str, type_v: str) -> bool:
    """Whether rows of these types are packed one by one, and not several tokens together."""
    return FORMATS[type_k].group_tokens == FORMATS[type_v].group_tokens == 1


def _bits(name: str) -> float:
    return KV_FORMATS[name].bits_per_value(64)


@dataclass(frozen=True)
class Pinned:
    """Tokens whose pages stay on the first rung: the first of a text, and the newest."""

    sink: int = 0
    tail: int = 0


NOT_PINNED = Pinned()


@dataclass(frozen=True)
class LadderSizes:
    """How an arena is divided.

    Attributes:
        unit: bytes, of one layer.
        units: of a page on each rung.
        n_units: that the arena has.
        page_tokens: of a page.
        n_storing: rungs, from the first on, whose types pack rows one by one.
        pinned: tokens of a text whose pages do not go down.
    """

    unit: int
    units: tuple[int, ...]
    n_units: int
    page_tokens: int
    n_storing: int
    pinned: Pinned = NOT_PINNED

    @classmethod
    def of(
        cls,
        group: CacheGroup,
        pairs: Sequence[Pair],
        budget: int,
        page_tokens: int,
        n_pages: int,
        pinned: Pinned = NOT_PINNED,
    ) -> LadderSizes:
        """Divide the arena for the layers of a group.

        Args:
            budget: bytes of K and V of all layers together.
            n_pages: the most that are ever held; no more is taken than these need on the first
                rung.
        """
        pages = [page_tokens * group.n_kv_heads * row_bytes(group, pair) for pair in pairs]
        unit = math.gcd(*pages)
        units = tuple(n // unit for n in pages)
        n_units = budget // (len(group.layers) * unit)
        n_storing = next((i for i, pair in enumerate(pairs) if not stores_rows(*pair)), len(pairs))
        n_units = min(n_units, n_pages * units[0])
        return cls(unit, units, n_units, page_tokens, n_storing, pinned)

    @property
    def n_pages(self) -> int:
        """Pages that there is room for, all on the last rung."""
        return self.n_units // self.units[-1]

    @property
    def n_sink(self) -> int:
        """Pages of the sink."""
        return -(-self.pinned.sink // self.page_tokens)

    def n_open(self, place: int) -> int:
        """How many rungs, from the first on, a page may be on while rows are stored in it, at a
        place of a text."""
        return 1 if self.pinned.tail or place < self.n_sink else self.n_storing

    def stays(self, place: int, length: int) -> bool:
        """Whether the page at a place of a text of `length` tokens may not go down.

        It may not if it belongs to the sink, or if the next token stores its row there or reads it
        as the tail.
        """
        oldest = length - max(0, self.pinned.tail - 1)
        return place < self.n_sink or (place + 1) * self.page_tokens > oldest

    def batch(self, n_batch: int) -> int:
        """Tokens of a batch at most, where one of `n_batch` would be: where its pages can't be on
        every rung, there are few of them."""
        everywhere = self.pinned == NOT_PINNED and self.n_storing == len(self.units)
        return n_batch if everywhere else min(n_batch, self.page_tokens // 2)

    def room(self, n_batch: int) -> int:
        """Pages of the longest text, read in batches of at most `n_batch` tokens."""
        return self._most(self.n_pages, lambda n: self._reading(n, n_batch))

    def room_together(self, n_texts: int, n_ctx: int, n_batch: int) -> int:
        """Tokens that `n_texts` texts can have together, with at most `n_ctx` each.

        Any of them may go on next, with a batch of at most `n_batch` tokens. The tokens are counted
        in as few texts as possible, since each text has pages that stay as they are.
        """
        each = -(-n_ctx // self.page_tokens)

        def needed(whole: int, n_pages: int) -> int:
            """Units that `whole` texts of full length and one with `n_pages` pages take."""
            kinds = [n for n, are in ((each, whole), (n_pages, n_pages)) if are]
            waiting = whole * self._waiting(each) + self._waiting(n_pages)
            return waiting + max(self._reading(n, n_batch) - self._waiting(n) for n in kinds)

        whole = self._most(n_texts, lambda n: needed(n, 0))
        if whole == n_texts:
            return whole * n_ctx
        last = self._most(each - 1, lambda n: needed(whole, n))
        return whole * n_ctx + last * self.page_tokens

    def _most(self, n: int, units: Callable[[int], int]) -> int:
        """The largest number up to n for which there are units."""
        return bisect_left(range(1, n + 1), True, key=lambda i: units(i) > self.n_units)

    def _reading(self, n_pages: int, n_batch: int) -> int:
        """The least units that a text of `n_pages` pages takes while it goes on."""
        before = max(0, self.pinned.tail - 1)
        across = (before + self.batch(n_batch) + self.page_tokens - 2) // self.page_tokens + 1
        lowest = self.units[self.n_open(self.n_sink) - 1]
        least = self._with_newest(n_pages, across, lowest)
        sink = min(n_pages, self.n_sink)
        begun = min(n_pages, sink + across - 1) if sink else 0  # a batch that leaves the sink
        return max(least, begun * self.units[0])

    def _waiting(self, n_pages: int) -> int:
        """Units that a text of `n_pages` pages may keep while another one goes on."""
        across = (max(1, self.pinned.tail) + self.page_tokens - 2) // self.page_tokens + 1
        return self._with_newest(n_pages, across, self.units[0])

    def _with_newest(self, n_pages: int, across: int, each: int) -> int:
        """Units of a text's `n_pages` pages: the sink's are on the first rung, the `across` newest
        ones take `each` units, and all others are on the last rung."""
        sink = min(n_pages, self.n_sink)
        newest = min(n_pages - sink, across)
        packed = n_pages - sink - newest
        return sink * self.units[0] + newest * each + packed * self.units[-1]

    def landing(
        self,
        free: int,
        n: int,
        lowerable: Sequence[int],
        *,
        n_open: int,
        still_open: Sequence[int] = (),
    ) -> int | None:
        """The highest of the first `n_open` rungs where `n` new pages fit, or None.

        Full pages go down for new ones, but to one rung below these at most: else a page would
        begin on the first rung and take others to the last. Only where new pages are on the lowest
        rung that they can be on, others go down as far as they can.

        Args:
            free: units.
            lowerable: the rungs of the pages that may go down.
            still_open: the rungs of pages that go down to where the new ones are, if they are
                higher.
        """
        for rung in range(max(still_open, default=0), n_open):
            lowest = rung + 1 if rung + 1 < n_open else len(self.units) - 1
            units = free + sum(self.units[one] - self.units[rung] for one in still_open)
            units += sum(self.units[one] - self.units[max(one, lowest)] for one in lowerable)
            if n * self.units[rung] <= units:
                return rung
        return None

    def growth(self, n_pages: int) -> Iterator[list[int] | None]:
        """The rungs of a text's pages, with one page, with two, ..., if its tokens come one by
        one; None and the end where there is no room."""
        rungs, last = list[int](), len(self.units) - 1
        for n in range(n_pages):
            able = [place for place in range(n) if not self.stays(place, n * self.page_tokens)]
            free = self.n_units - sum(self.units[rung] for rung in rungs)
            lowerable = [rungs[place] for place in able]
            landing = self.landing(free, 1, lowerable, n_open=self.n_open(n))
            if landing is None:
                yield None
                return
            while free < self.units[landing]:
                place = min(
                    (place for place in able if rungs[place] < last),
                    key=lambda place: lowering_order(rungs[place], place),
                )
                free += self.units[rungs[place]] - self.units[rungs[place] + 1]
                rungs[place] += 1
            rungs.append(landing)
            yield list(rungs)


def lowering_order(rung: int, place: int) -> tuple[int, bool, int]:
    """The order in which pages go down: rung by rung from the first, and on each rung the oldest
    first, but the page with a text's first tokens last."""
    return rung, place == 0, place


def row_bytes(group: CacheGroup, pair: Pair) -> int:
    """Bytes of a token's row of K and V in one layer and KV head."""
    k, v = pair
    return FORMATS[k].row_bytes(group.key_dim) + FORMATS[v].row_bytes(group.value_dim)
