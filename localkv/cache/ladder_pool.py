"""The pages of a cache with a budget: which rung each is on, and where it lies in the arena.

Sequences hold pages by numbers that stay the same, so a page that goes down a rung, or is moved, is
so for all sequences that share it. Pages that a sequence has rows to store in are on one rung, and
stay there until they are full: a batch's rows go to one segment. Where a text was cut back to such
a page, or begins like another one there, the page may be on a lower rung than a new one would be.
Then the sequence gets it on a higher one.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from localkv.cache.arrays import Array, Arrays, SegmentBatch, row_fields
from localkv.cache.ladder import LadderSizes, lowering_order
from localkv.cache.layout import PAGE_TOKENS, GroupLayout, PoolLayout
from localkv.cache.pages import Keeper, NoPageError, PagePool, SegmentRows, Sequence
from localkv.quant_formats import FORMATS

STEPS_AHEAD = 16
"""Tokens before the end of a page from which on each frees a little of the room for the next."""


class LadderKeeper(Keeper, Protocol):
    """The owner of the rows that are in the pages."""

    def known(self) -> list[Sequence]:
        """All sequences that there are."""
        ...

    def move_run(self, n: int, first: int, to: int) -> None:
        """Move units of the arenas, which may overlap."""
        ...

    def repack_page(self, rung: int, place: int) -> None:
        """Pack a page as the next rung has it, in the first of its units."""
        ...

    def raise_page(self, rung: int, place: int, higher: int, to: int) -> None:
        """Pack a page as a higher rung has it, at another place."""
        ...


@dataclass
class Requantised:
    """Pages that went down a rung, and the seconds that it took."""

    n_pages: int = 0
    seconds: float = 0.0

    def __sub__(self, before: Requantised) -> Requantised:
        return Requantised(self.n_pages - before.n_pages, self.seconds - before.seconds)

    def add(self, more: Requantised) -> None:
        """Count more of them."""
        self.n_pages += more.n_pages
        self.seconds += more.seconds


class LadderPool(PagePool):
    """A `PagePool` whose pages are on the rungs of a ladder.

    Args:
        sizes: of the arena.

    Attributes:
        rungs: of each page, by its number.
        version: changes with each page that is taken or moved, or goes down a rung. A number that
            was given back may come to lie elsewhere, on another rung.
        requantised: so far.
        highest: rung on which pages begin; 0 but for a warm-up.
    """

    keeper: LadderKeeper

    def __init__(
        self,
        index: int,
        layout: GroupLayout,
        pool: PoolLayout,
        keeper: LadderKeeper,
        sizes: LadderSizes,
    ) -> None:
        super().__init__(index, layout, pool, sizes.n_pages, keeper)
        self.sizes = sizes
        self.rungs = [0] * self.n_pages
        self.runs = Runs(sizes.n_units)
        self.version = 0
        self.requantised = Requantised()
        self.highest = 0

    def place(self, page: int) -> int:
        """The first unit of a page."""
        return self.runs.first(page)

    def counts(self) -> list[int]:
        """Pages on each rung."""
        found = [0] * len(self.sizes.units)
        for page in self.runs.owners:
            found[self.rungs[page]] += 1
        return found

    def take(self) -> int:
        return self.take_on(self._landing(1))

    def take_on(self, rung: int) -> int:
        """A page on a rung that nobody holds.

        Raises:
            NoPageError: there is no room.
        """
        n = self.sizes.units[rung]
        if not self.free or not self._make_room(n):
            raise self._full()
        page = self.free.pop()
        if not self.runs.take(page, n):
            for move in self.runs.gather(n):
                self.keeper.move_run(move.n, move.first, move.to)
            self.runs.take(page, n)
        self.version += 1
        self.rungs[page] = rung
        self.n_holders[page] = 1
        return page

    def _full(self) -> NoPageError:
        k, v = self.layout.segments[-1].type_k, self.layout.segments[-1].type_v
        return NoPageError(
            f"the KV cache is full: its budget has no room for another {PAGE_TOKENS} tokens, with "
            f"all pages that may change in {k}/{v}, the last types of the ladder",
            hint="use a larger --kv-budget",
        )

    def give_back(self, pages: Seq[int]) -> None:
        for page in reversed(pages):
            self.n_holders[page] -= 1
            if not self.n_holders[page]:
                self.free.append(page)
                self.runs.give_back(page)

    def count(self, sequences: Iterable[Sequence]) -> None:
        super().count(sequences)
        held = (page for page in range(self.n_pages) if self.n_holders[page])
        self.runs.keep({page: self.sizes.units[self.rungs[page]] for page in held})

    @property
    def has_room(self) -> bool:
        try:
            return self._landing(1) is not None and bool(self.free)
        except NoPageError:
            return False

    def has_room_for(self, n: int, spare: Seq[int], begun: Seq[int]) -> bool:
        if not super().has_room_for(n, spare, begun):
            return False
        units, given = self.sizes.units, set(spare)
        free = self.runs.n_free + sum(units[self.rungs[page]] for page in given)
        lowerable = (page for page in self._lowerable() if page not in given)
        free += sum(units[self.rungs[page]] - units[-1] for page in lowerable)
        copies = [units[self.rungs[page]] for page in begun[:n]]  # a copy is on the same rung
        return sum(copies) + (n - len(copies)) * units[self.n_open - 1] <= free

    def reserve(self, sequence: Sequence, length: int, position: int) -> None:
        pages, first = sequence.pages[self.index], position // PAGE_TOKENS
        n_open, places = self.sizes.n_open(first), range(first, len(pages))
        n_new = self.n_places(length) - len(pages)
        too_low = [place for place in places if self.rungs[pages[place]] >= n_open]
        goes_on_anew = n_new > 0 or position == sequence.cut_to
        if goes_on_anew and self._can_go_up(pages[first:], max(0, n_new), n_open):
            too_low = list(places)
        others = [place for place in places if place not in too_low]
        try:
            self._own_places(sequence, others)
        except NoPageError:  # a copy on the rung of the page does not fit: on a lower one it may
            too_low += [place for place in others if self.n_holders[pages[place]] > 1]
            others = [place for place in others if place not in too_low]
        still_open = [pages[place] for place in others]
        rungs = [self.rungs[page] for page in still_open]
        rung = max(rungs, default=0)
        if n_new > 0 or too_low:
            rung = self._landing(max(0, n_new) + len(too_low), n_open=n_open, still_open=rungs)
        for page in still_open:
            while self.rungs[page] < rung:
                self._lower(page)
        for place in too_low:
            self._raise(pages, place, rung)
        for _ in range(n_new):
            pages.append(self.take_on(rung))
        if n_new <= 0 and self.is_due(length):
            self._lower_ahead(sequence, length + -length % PAGE_TOKENS)

    def _can_go_up(self, still_open: Seq[int], n_new: int, n_open: int) -> bool:
        """Whether there is room for all pages of a batch on a higher rung than the pages that have
        rows already.

        These would keep the new rows down with them.
        """
        n = n_new + len(still_open)
        highest = min((self.rungs[page] for page in still_open), default=0)
        if not highest or len(self.free) < n:
            return False
        try:
            return self._landing(n, n_open=n_open) < highest
        except NoPageError:
            return False

    def is_due(self, length: int) -> bool:
        """Whether a sequence of `length` tokens soon takes a page that there is no room for yet."""
        left = -length % PAGE_TOKENS
        return left < STEPS_AHEAD and length + left < self.end and self._lacks_units()

    def _lacks_units(self) -> bool:
        return self.runs.n_free < self.sizes.units[0]

    def _lower_ahead(self, sequence: Sequence, length: int) -> None:
        """Let a page go down, if a sequence has it go anyway once it has `length` tokens and takes
        its next page.

        One page between two tokens is a shorter wait than all of them together.
        """
        will, able, free = self._lowerable(sequence, length), self._lowerable(), self.runs.n_free
        rungs, units = [self.rungs[page] for page in will], self.sizes.units
        landing = self.sizes.landing(free, 1, rungs, n_open=self.n_open)
        if landing is None:
            return
        for page, rung in zip(will, rungs, strict=True):
            if free >= units[landing] or rung > rungs[0]:
                return
            if page in able:
                self._lower(page)
                return
            free += units[rung] - units[rung + 1]

    def _own_places(self, sequence: Sequence, places: Iterable[int]) -> None:
        """Put copies in the place of shared pages."""
        pages = sequence.pages[self.index]
        for place in places:
            page = pages[place]
            n = self.sizes.units[self.rungs[page]]
            while self.n_holders[page] > 1 and self.runs.n_free < n and self.keeper.make_room():
                pass  # which may have taken the others away
            if self.n_holders[page] > 1:
                copy = self.take_on(self.rungs[page])
                self.keeper.copy_page(self.index, page, copy)
                pages[place] = copy
                self.give_back([page])

    def _raise(self, pages: list[int], place: int, rung: int) -> None:
        """Put what a page has, on a higher rung, in its place."""
        page = pages[place]
        higher = self.take_on(rung)
        self.keeper.raise_page(self.rungs[page], self.place(page), rung, self.place(higher))
        pages[place] = higher
        self.give_back([page])

    @property
    def n_open(self) -> int:
        """Rungs on which the pages of a long text begin."""
        return self.sizes.n_open(self.sizes.n_sink)

    def _landing(self, n: int, *, n_open: int | None = None, still_open: Seq[int] = ()) -> int:
        """The rung that `n` new pages go to: the highest on which they fit, once texts that are
        only kept are gone and full pages have gone down.

        Args:
            n_open, still_open: as `LadderSizes.landing` has them.

        Raises:
            NoPageError: they fit on none.
        """
        wanted = n * self.sizes.units[max(still_open, default=0)]
        while self.runs.n_free < wanted and self.keeper.make_room():
            pass
        n_open, free = self.n_open if n_open is None else n_open, self.runs.n_free
        full = self._lowerable() if free < wanted else []
        rungs = [self.rungs[page] for page in full]
        rung = self.sizes.landing(free, n, rungs, n_open=n_open, still_open=still_open)
        if rung is None:
            raise self._full()
        return max(rung, self.highest)

    def _make_room(self, n: int) -> bool:
        """Make at least `n` units free; return whether that worked."""
        while self.runs.n_free < n and self.keeper.make_room():
            pass
        if self.runs.n_free < n:
            for page in self._in_turn():
                self._lower(page)
                if self.runs.n_free >= n:
                    break
        return self.runs.n_free >= n

    def _in_turn(self) -> Iterator[int]:
        """Pages that go down, one after the other."""
        while pages := self._lowerable():
            lowest = self.rungs[pages[0]]
            yield from (page for page in pages if self.rungs[page] == lowest)

    def _lowerable(self, grown: Sequence | None = None, length: int = 0) -> list[int]:
        """Pages that may go down a rung, in the order in which they do: those that have to stay
        for no sequence.

        Args:
            grown, length: a sequence, and the tokens that it is taken to have.
        """
        places, staying = dict[int, int](), set[int]()
        for sequence in self.keeper.known():
            n_tokens = length if sequence is grown else sequence.length
            for place, page in enumerate(sequence.pages[self.index]):
                places[page] = place
                if self.sizes.stays(place, n_tokens):
                    staying.add(page)
        last = len(self.sizes.units) - 1
        found = [page for page in places if page not in staying and self.rungs[page] < last]
        return sorted(found, key=lambda page: lowering_order(self.rungs[page], places[page]))

    def _lower(self, page: int) -> None:
        """Let a page go down a rung."""
        started = time.perf_counter()
        self.keeper.repack_page(self.rungs[page], self.place(page))
        self.rungs[page] += 1
        self.runs.shrink(page, self.sizes.units[self.rungs[page]])
        self.version += 1
        self.requantised.add(Requantised(1, time.perf_counter() - started))


class Move(NamedTuple):
    """A run that has to go from one place to another, further to the front; they may overlap."""

    owner: int
    n: int
    first: int
    to: int


class Runs:
    """Runs of units, each of one owner.

    Args:
        n_units: that there are.

    Attributes:
        n_free: units that nobody has.
    """

    def __init__(self, n_units: int) -> None:
        self.n_units = self.n_free = n_units
        self._sizes = dict[int, int]()
        self._firsts = dict[int, int]()
        self._order = list[tuple[int, int]]()  # (first unit, owner)

    def first(self, owner: int) -> int:
        """The first unit of an owner's run."""
        return self._firsts[owner]

    @property
    def owners(self) -> list[int]:
        """All of them, in the order of their runs."""
        return [owner for _, owner in self._order]

    def _gaps(self) -> list[tuple[int, int]]:
        """(first, units) of the gap before each run, and after the last."""
        found, at = list[tuple[int, int]](), 0
        for first, owner in self._order:
            found.append((at, first - at))
            at = first + self._sizes[owner]
        return [*found, (at, self.n_units - at)]

    def take(self, owner: int, n: int) -> bool:
        """Give an owner the smallest gap of `n` units; False if there is none so long."""
        fitting = [(size, first) for first, size in self._gaps() if size >= n]
        if not fitting:
            return False
        _, first = min(fitting)
        self._sizes[owner], self._firsts[owner] = n, first
        insort(self._order, (first, owner))
        self.n_free -= n
        return True

    def shrink(self, owner: int, n: int) -> None:
        """Leave an owner the first `n` of its units."""
        self.n_free += self._sizes[owner] - n
        self._sizes[owner] = n

    def give_back(self, owner: int) -> None:
        """Take an owner's run away."""
        first = self._firsts.pop(owner)
        self.n_free += self._sizes.pop(owner)
        del self._order[bisect_left(self._order, (first, owner))]

    def keep(self, sizes: Mapping[int, int]) -> None:
        """Cut the run of each owner in `sizes` to its first `sizes[owner]` units, and take away all
        other runs. It works on whatever an exception between two instructions has left."""
        self._sizes = {owner: n for owner, n in sizes.items() if owner in self._firsts}
        self._firsts = {owner: self._firsts[owner] for owner in self._sizes}
        self._order = sorted((first, owner) for owner, first in self._firsts.items())
        self.n_free = self.n_units - sum(self._sizes.values())

    def gather(self, n: int) -> list[Move]:
        """Bring `n` free units together, of `n_free` at least: the moves to be made, in order, the
        fewest units that do."""
        gaps = self._gaps()
        sizes = [self._sizes[owner] for _, owner in self._order]
        best, start, free, moved = None, 0, 0, 0
        for end, (_, size) in enumerate(gaps):
            free += size
            moved += sizes[end - 1] if end > start else 0
            while free - gaps[start][1] >= n:
                free -= gaps[start][1]
                moved -= sizes[start]
                start += 1
            if free >= n and (best is None or moved < best[0]):
                best = moved, start, end
        assert best is not None
        _, start, end = best
        at, moves = gaps[start][0], list[Move]()
        for i in range(start, end):
            first, owner = self._order[i]
            moves.append(Move(owner, sizes[i], first, at))
            self._order[i], self._firsts[owner] = (at, owner), at
            at += sizes[i]
        return moves


Planes = tuple[tuple[Array, ...], tuple[Array, ...]]
"""The planes of K and of V."""


class LadderRows:
    """The memory of a ladder's pages.

    Args:
        layout: of the layers.
        sizes: of the arenas.

    Attributes:
        arenas: of each layer, uint8 [units, bytes of a unit].
    """

    def __init__(
        self, arrays: Callable[[int], Arrays], layout: GroupLayout, sizes: LadderSizes
    ) -> None:
        self.arrays, self.layout, self.sizes = arrays, layout, sizes
        shape = (sizes.n_units, sizes.unit)
        self.arenas = {layer: arrays(layer).bytes(shape) for layer in layout.group.layers}

    def planes(self, layer: int, rung: int) -> Planes:
        """The planes of a rung: uint8 [places, n_kv_heads, PAGE_TOKENS, blocks, plane bytes].

        A page at place p begins at unit p, K's planes first. Pages that are in use don't overlap.
        The planes of other rungs are views of the same bytes.
        """
        spec, group, sizes = self.layout.segments[rung], self.layout.group, self.sizes
        n_places = max(0, sizes.n_units - sizes.units[rung] + 1)
        first, sides = 0, list[tuple[Array, ...]]()
        for name, dim in ((spec.type_k, group.key_dim), (spec.type_v, group.value_dim)):
            planes = list[Array]()
            for n_blocks, n_bytes in row_fields(FORMATS[name], dim):
                shape = (n_places, group.n_kv_heads, PAGE_TOKENS, n_blocks, n_bytes)
                arena, strided = self.arenas[layer], self.arrays(layer).strided
                planes.append(strided(arena, first, shape, sizes.unit))
                first += group.n_kv_heads * PAGE_TOKENS * n_blocks * n_bytes
            sides.append(tuple(planes))
        return sides[0], sides[1]

    def move(self, n: int, first: int, to: int) -> None:
        """Move units of each layer further to the front; they may overlap."""
        for arena in self.arenas.values():
            for at in range(0, n, max(1, first - to)):  # pieces that don't overlap
                size = min(first - to, n - at)
                arena[to + at : to + at + size] = arena[first + at : first + at + size]

    def copy(self, n: int, first: int, to: int) -> None:
        """Copy units of each layer to others."""
        for arena in self.arenas.values():
            arena[to : to + n] = arena[first : first + n]


@dataclass(frozen=True)
class RungPages:
    """A sequence's pages on a rung, in order of position, as if no others were between them.

    Attributes:
        places: of the pages.
        n_rows: rows in these pages, including the rows of new tokens.
        first: the position of row 0 by which new rows get theirs, if they go here; else 0.
        grows: new rows go here; then the pages that they go to are the last ones.
    """

    places: list[int]
    n_rows: int
    first: int
    grows: bool


def rung_pages(pool: LadderPool, rung: int, pages: Seq[int], position: int, end: int) -> RungPages:
    """A sequence's pages on a rung. Its new tokens are at positions `position` to `end` - 1."""
    n_full = position // PAGE_TOKENS
    found = [page for page in pages[:n_full] if pool.rungs[page] == rung]
    n_rows, first = PAGE_TOKENS * len(found), 0
    grows = pool.rungs[pages[n_full]] == rung
    if grows:
        first = PAGE_TOKENS * n_full - n_rows
        found += pages[n_full : pool.n_places(end)]
        n_rows = end - first
    return RungPages([pool.place(page) for page in found], n_rows, first, grows)


def rung_batch(
    rows: SegmentRows,
    pool: LadderPool,
    parts: Seq[tuple[Sequence, Seq[int]]],
    starts: Seq[int],
    arrays: Arrays,
) -> SegmentBatch:
    """A batch's part in the segment of a rung."""
    assert rows.rung is not None
    tables, lengths, firsts = list[list[int]](), list[int](), list[int]()
    tokens, slots = list[int](), list[int]()
    for (sequence, ids), start in zip(parts, starts, strict=False):
        end = sequence.length + len(ids)
        found = rung_pages(pool, rows.rung, sequence.pages[rows.pool], sequence.length, end)
        for i in range(len(ids)) if found.grows else ():
            row = sequence.length + i - found.first
            tokens.append(start + i)
            slots.append(found.places[row // PAGE_TOKENS] * PAGE_TOKENS + row % PAGE_TOKENS)
        tables.append(found.places)
        lengths.append(found.n_rows)
        firsts.append(found.first)
    width = max((len(table) for table in tables), default=0) or 1
    return SegmentBatch(
        page_table=arrays.int64([table + [0] * (width - len(table)) for table in tables]),
        lengths=tuple(lengths),
        length_table=arrays.int32(lengths),
        first_position=0,
        tokens=arrays.int64(tokens),
        slots=arrays.int64(slots),
        first_positions=tuple(firsts),
        first_table=arrays.int64(firsts),
    )
