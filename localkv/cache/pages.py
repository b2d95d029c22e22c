"""Pages of a group's segment: which are free, which a sequence holds, and which it gives back.

Sequences that begin alike share pages (`KVCache.fork`). Nobody writes to such a page: whoever has a
row to store there takes a copy first.

Rows that no later token sees are no longer needed. They stay as long as there is room for them, in
case that the sequence is cut back, and the oldest go first. A *checkpoint* is a length that the
sequence is likely to be cut back to: what is seen from there goes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from localkv.cache.layout import PAGE_TOKENS, GroupLayout, PoolLayout, SegmentSpec, pages_for
from localkv.errors import LocalKVError

NO_SLOT = -1
"""The place of a sequence that is kept to be forked, and never evaluated itself."""


class NoPageError(LocalKVError):
    """No page is free."""


class Keeper(Protocol):
    """The owner of the rows that are in the pages."""

    def make_room(self) -> bool:
        """No page of a pool is free: whether one is now, or may be after a further call."""
        ...

    def copy_page(self, pool: int, source: int, target: int) -> None:
        """Give a page of a pool the rows of another."""
        ...

    def clear_page(self, pool: int, page: int) -> None:
        """Make the rows of a page numbers: kernels multiply those that nobody sees with 0."""
        ...


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """All states of a sequence after `length` tokens, float32 [n] on the host.

    A mark is there for the next few tokens only, which may be taken back.
    """

    length: int
    data: Any
    is_mark: bool = False


@dataclass
class Sequence:
    """The rows of one sequence: `length` tokens.

    Attributes:
        pages: of each pool, ids in order of position, of every page up to the last; 0 where it was
            given back.
        gone: of each pool, the places in `pages` of those that were.
        checkpoint: a length that it may be cut back to, or 0.
        exact_from: of each pool, the position before which the rows of a tail are lost: the
            sequence was cut back further than they reach. 0 if none are.
        slot: its place among the states of recurrent layers, or `NO_SLOT`.
        n_stepped: tokens that its states have seen; they may be ahead of `length`. -1 if its only
            states are in checkpoints.
        kept: checkpoints of its states, in order of their lengths.
        between: the states after each token from this position on, but the last, are kept, too
            (`RecurrentStates.after`); -1 if none are.
        cut_to: the length that it was cut back to, or forked at, last; -1 if it never was.
        scales: of the adapters that its rows are made with, none for 0 of all.
    """

    n_pools: int
    length: int = 0
    checkpoint: int = 0
    slot: int = 0
    n_stepped: int = 0
    kept: list[Checkpoint] = field(default_factory=list)
    cut_to: int = -1
    between: int = -1
    scales: tuple[float, ...] = ()
    pages: list[list[int]] = field(init=False)
    gone: list[set[int]] = field(init=False)
    exact_from: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Hold nothing; nobody gets the pages."""
        self.length = self.checkpoint = self.n_stepped = 0
        self.cut_to = self.between = -1
        self.kept = []
        self.pages = [[] for _ in range(self.n_pools)]
        self.gone = [set() for _ in range(self.n_pools)]
        self.exact_from = [0] * self.n_pools

    def copy_places(self, other: Sequence) -> None:
        """Have the rows of another sequence, but for the states of recurrent layers."""
        self.length, self.checkpoint = other.length, other.checkpoint
        self.kept = list(other.kept)
        self.pages = [list(pages) for pages in other.pages]
        self.gone = [set(places) for places in other.gone]
        self.exact_from = list(other.exact_from)
        self.scales = other.scales

    def ahead(self, n_tokens: int) -> Sequence:
        """It with more tokens, whose pages are taken: the same pages, and the same lists of them.

        So tokens of two kinds can be part of one batch, one kind after the other.
        """
        other = copy(self)
        other.length += n_tokens
        return other

    def held(self, pool: int) -> list[int]:
        """The ids of the pages of a pool that it has."""
        gone = self.gone[pool]
        return [page for place, page in enumerate(self.pages[pool]) if place not in gone]


class PagePool:
    """The ids of the pages of a group's segment, shared by its layers and by all sequences.

    Args:
        index: its number among the pools of the cache.
        layout: the group's.
        pool: which positions it has rows of, and how many pages a sequence needs at most.
        n_pages: how many there are.
        keeper: has the rows.
    """

    def __init__(
        self, index: int, layout: GroupLayout, pool: PoolLayout, n_pages: int, keeper: Keeper
    ) -> None:
        self.index = index
        self.keeper = keeper
        self.layout = layout
        self.first, self.end = pool.first, pool.end
        self.most, self.kept = pool.most, pool.kept
        self.n_pages = n_pages
        self.free = list(reversed(range(self.n_pages)))
        self.n_holders = [0] * self.n_pages
        self.segment, self.spec = pool.segment, layout.segments[pool.segment]
        self.tail = self.spec.tail if self.spec.is_tail else None

    def take(self) -> int:
        """A page that nobody holds.

        Raises:
            NoPageError: there is none.
        """
        if not self.has_room:
            raise NoPageError(
                f"the KV cache is full: all {self.n_pages} pages of {PAGE_TOKENS} tokens are taken",
                hint="use a larger context",
            )
        page = self.free.pop()
        self.n_holders[page] = 1
        return page

    def share(self, pages: Seq[int]) -> None:
        """One more sequence holds these pages."""
        for page in pages:
            self.n_holders[page] += 1

    def give_back(self, pages: Seq[int]) -> None:
        """One sequence less holds these pages; those that nobody holds are free."""
        for page in reversed(pages):
            self.n_holders[page] -= 1
            if not self.n_holders[page]:
                self.free.append(page)

    def count(self, sequences: Iterable[Sequence]) -> None:
        """Find out again who holds which pages: `sequences` are all there are."""
        self.n_holders = [0] * self.n_pages
        for sequence in sequences:
            n_places = len(sequence.pages[self.index])
            sequence.gone[self.index] &= set(range(n_places))
            self.share(sequence.held(self.index))
        self.free = [page for page in reversed(range(self.n_pages)) if not self.n_holders[page]]

    def n_places(self, length: int) -> int:
        """Pages up to the last one of a sequence of `length` tokens."""
        if not length:
            return (
                0  # nor one for rows before the first token, where a tail's pages begin with such
            )
        return pages_for(max(0, min(length, self.end) - self.first))

    def n_rows(self, length: int) -> int:
        """Rows up to the last one that a sequence of `length` tokens has stored."""
        end = min(length, self.end)
        if not self.spec.stores_at_once and self.spec.tail is not None:
            end = self.spec.tail.whole(end)
        return max(0, end - self.first)

    def first_place(self, position: int) -> int:
        """The place of the first page that the token at `position` or a later one needs. Pages of a
        sink don't count, as they are always needed."""
        needed = self.tail or self.layout
        return max(0, needed.first_needed(position) - self.first) // PAGE_TOKENS

    def n_full(self, length: int) -> int:
        """Pages that the first `length` tokens fill."""
        return max(0, min(length, self.end) - self.first) // PAGE_TOKENS

    def n_needed(self, length: int, sequence: Sequence, n_shared: int) -> int:
        """Pages that a sequence of `length` tokens needs if it begins with `n_shared` of another,
        and shares the pages that these fill."""
        held = set(range(self.n_full(n_shared))) - sequence.gone[self.index]
        return min(self.n_places(length), self.most) - min(len(held), self.most)

    def reserve(self, sequence: Sequence, length: int, position: int) -> None:
        """Take the pages for `length` tokens of a sequence. The tokens from `position` on are still
        to be evaluated.

        Raises:
            NoPageError: no page is free.
        """
        pages, gone = sequence.pages[self.index], sequence.gone[self.index]
        needed = self.first_place(position)
        self._own(sequence, position)
        for place in range(len(pages), self.n_places(length)):
            if self.kept <= place < needed:
                gone.add(place)
                pages.append(0)
                continue
            if len(pages) - len(gone) >= self.most or not self.has_room:
                self._give_back_one(sequence, needed)
            pages.append(self.take())
            if self.tail is not None and self.first + place * PAGE_TOKENS < position:
                self.keeper.clear_page(self.index, pages[-1])  # begins with rows that nobody stores

    @property
    def has_room(self) -> bool:
        """Whether a page is free, or can be made so."""
        while not self.free and self.keeper.make_room():
            pass
        return bool(self.free)

    def has_room_for(self, n: int, spare: Seq[int], begun: Seq[int]) -> bool:
        """Whether `n` pages are free once others are given back.

        Args:
            spare: those others.
            begun: the page that one of them begins as a copy of, if one does.
        """
        return len(self.free) + len(spare) >= n

    def _is_shared(self, page: int) -> bool:
        """Whether others hold a page, and there may be room for a copy of it."""
        while self.n_holders[page] > 1 and not self.free and self.keeper.make_room():
            pass  # which may have taken the others away
        return self.n_holders[page] > 1

    def _own(self, sequence: Sequence, position: int) -> None:
        """Put copies in the place of shared pages in which rows from `position` on are to be
        stored. A group that is packed later lies in one page."""
        pages, gone = sequence.pages[self.index], sequence.gone[self.index]
        for place in range(max(0, position - self.first) // PAGE_TOKENS, len(pages)):
            page = pages[place]
            if place in gone or not self._is_shared(page):
                continue
            copy = self.take()
            self.keeper.copy_page(self.index, page, copy)
            pages[place] = copy
            self.give_back([page])

    def _give_back_one(self, sequence: Sequence, needed: int) -> None:
        """Give back the page that is the least likely to be needed, if any can be spared.

        Args:
            needed: place of the first that can't.
        """
        pages, gone = sequence.pages[self.index], sequence.gone[self.index]
        spare = [place for place in range(self.kept, min(needed, len(pages))) if place not in gone]
        if not spare:
            return
        checkpoint = sequence.checkpoint
        kept = range(self.first_place(checkpoint - PAGE_TOKENS), self.n_places(checkpoint))
        place = next((place for place in spare if place not in kept), spare[0])
        gone.add(place)
        self.give_back([pages[place]])
        pages[place] = 0

    def gap(self, sequence: Sequence, length: int, *, exactly: bool = False) -> int | None:
        """The first position whose rows a sequence cut back to `length` would lack, or None.

        Rows that a tail lacks can be read packed, except the rows of an open group: they are not
        packed yet.

        Args:
            exactly: nothing is to be read packed that never was before.
        """
        if self.tail is None or (exactly and not sequence.exact_from[self.index]):
            return self._missing(sequence, length)
        if exactly:
            return 0 if length else None
        whole = self.tail.whole(length)
        return whole if whole < length and self._lacks_tail(sequence, length) else None

    def _missing(self, sequence: Sequence, length: int, first: int = 0) -> int | None:
        """The position of the first row that was given back, of those from `first` on."""
        gone = sequence.gone[self.index]
        first = max(self.first_place(length), (first - self.first) // PAGE_TOKENS)
        places = range(first, self.n_places(length)) if gone else ()
        missing = next((place for place in places if place in gone), None)
        return None if missing is None else self.first + missing * PAGE_TOKENS

    def _lacks_tail(self, sequence: Sequence, length: int) -> bool:
        """Whether the tail of the token at `length` lacks rows that it could have."""
        exact_from = sequence.exact_from[self.index]
        return length < exact_from or self._missing(sequence, length, exact_from) is not None

    def cut(self, sequence: Sequence, length: int) -> None:
        """Give back the pages of tokens from position `length` on."""
        pages, gone = sequence.pages[self.index], sequence.gone[self.index]
        keep = self.n_places(length)
        if self.tail is not None and self._lacks_tail(sequence, length):
            sequence.exact_from[self.index] = length if length > self.tail.start else 0
            if keep - 1 in gone:  # the tokens to come need a page there
                keep -= 1
        self.give_back([pages[place] for place in range(keep, len(pages)) if place not in gone])
        del pages[keep:]
        if gone:
            sequence.gone[self.index] = {place for place in gone if place < keep}


@dataclass(frozen=True)
class SegmentRows:
    """The rows of a segment.

    Attributes:
        first, end: positions.
        pool: index of the pool that has their pages.
        rung: of the ladder that the segments are, or None.
        tail_pool, tail_first: the pool of the tail, if there is one, and the position of its row 0.
    """

    spec: SegmentSpec
    first: int
    end: int
    pool: int
    tail_pool: int | None = None
    tail_first: int = 0
    rung: int | None = None

    @property
    def begin(self) -> int:
        """The first position of a row that is stored."""
        tail = self.spec.tail
        return self.first if tail is None else tail.start

    def grows_at(self, position: int) -> bool:
        """Whether the token at a position has a row here."""
        return self.begin <= position < self.end

    def stores_at(self, position: int) -> bool:
        """Whether its row is stored as it comes."""
        return self.grows_at(position) and self.spec.stores_at_once

    def exact_from(self, sequence: Sequence) -> int:
        """The position before which no tail of a sequence begins."""
        return 0 if self.tail_pool is None else sequence.exact_from[self.tail_pool]

    def n_seen(self, sequence: Sequence, length: int) -> int:
        """Rows of a sequence that its tokens up to position `length` - 1 see at most."""
        tail, end = self.spec.tail, min(length, self.end)
        if tail is not None and not self.spec.is_tail:
            end = min(end, max(int(tail.begin(length - 1)), self.exact_from(sequence)))
        return max(0, end - self.first)

    def new_slots(self, sequence: Sequence, length: int) -> Iterator[tuple[int, int]]:
        """The positions whose rows are stored as they come, up to `length` - 1, and their slots."""
        if not self.spec.stores_at_once:
            return
        for position in range(max(self.begin, sequence.length), min(length, self.end)):
            yield position, _slot(sequence.pages[self.pool], position - self.first)

    def new_groups(self, sequence: Sequence, length: int) -> Iterator[tuple[int, int]]:
        """The slots of the first rows of groups that are complete once there are `length` tokens,
        here and in the tail."""
        tail = self.spec.tail
        if self.spec.stores_at_once or tail is None or self.tail_pool is None:
            return
        pages, tail_pages = sequence.pages[self.pool], sequence.pages[self.tail_pool]
        begun = max(tail.start, tail.whole(sequence.length))
        for position in range(begun, length - tail.group + 1, tail.group):
            yield (
                _slot(pages, position - self.first),
                _slot(tail_pages, position - self.tail_first),
            )


def _slot(pages: list[int], row: int) -> int:
    return pages[row // PAGE_TOKENS] * PAGE_TOKENS + row % PAGE_TOKENS


def segment_rows(layout: GroupLayout, n_ctx: int, first_pool: int) -> list[SegmentRows]:
    """The rows of each of a group's segments, whose pools are numbered from `first_pool` on."""
    bounds, last = layout.bounds(n_ctx), len(layout.segments) - 1
    tail_pool, tail_first = None, 0
    if layout.segments[last].is_tail:
        tail_pool, tail_first = first_pool + layout.pool_of(last), bounds[last][0]
    return [
        SegmentRows(
            spec,
            *bounds[i],
            first_pool + layout.pool_of(i),
            tail_pool if spec.tail is not None else None,
            tail_first,
            None if layout.budget is None else i,
        )
        for i, spec in enumerate(layout.segments)
    ]
