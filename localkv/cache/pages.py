"""Pages of a group's segment: which are free, which a sequence holds, and which it gives back.

Rows that no later token sees are no longer needed. They stay as long as there is room for them, in
case that the sequence is cut back, and the oldest go first. A *checkpoint* is a length that the
sequence is likely to be cut back to: what is seen from there goes last.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from localkv.cache.layout import PAGE_TOKENS, GroupLayout, PoolLayout, pages_for
from localkv.errors import LocalKVError

if TYPE_CHECKING:
    from localkv.cache.recurrent_state import Checkpoint


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
        slot: its place among the states of recurrent layers.
        n_stepped: tokens that its states have seen; they may be ahead of `length`.
        kept: checkpoints of its states, in order of their lengths.
    """

    n_pools: int
    length: int = 0
    checkpoint: int = 0
    slot: int = 0
    n_stepped: int = 0
    kept: list[Checkpoint] = field(default_factory=list)
    pages: list[list[int]] = field(init=False)
    gone: list[set[int]] = field(init=False)
    exact_from: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Hold nothing; nobody gets the pages."""
        self.length = self.checkpoint = self.n_stepped = 0
        self.kept = []
        self.pages = [[] for _ in range(self.n_pools)]
        self.gone = [set() for _ in range(self.n_pools)]
        self.exact_from = [0] * self.n_pools

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
        n_sequences: sequences that hold so many at the same time.
    """

    def __init__(
        self, index: int, layout: GroupLayout, pool: PoolLayout, n_sequences: int = 1
    ) -> None:
        self.index = index
        self.layout = layout
        self.first, self.end = pool.first, pool.end
        self.most, self.kept = pool.most, pool.kept
        self.n_pages = self.most * n_sequences
        self.free = list(reversed(range(self.n_pages)))
        spec = layout.segments[pool.segment]
        self.tail = spec.tail if spec.is_tail else None

    def take(self) -> int:
        if not self.free:
            raise LocalKVError(
                f"the KV cache is full: all {self.n_pages} pages of {PAGE_TOKENS} tokens are taken",
                hint="use a larger context",
            )
        return self.free.pop()

    def give_back(self, pages: Seq[int]) -> None:
        self.free.extend(reversed(pages))

    def n_places(self, length: int) -> int:
        """Pages up to the last one of a sequence of `length` tokens."""
        return pages_for(max(0, min(length, self.end) - self.first))

    def first_place(self, position: int) -> int:
        """The place of the first page that the token at `position`, or a later one, needs, besides
        those of a sink."""
        needed = self.tail or self.layout
        return max(0, needed.first_needed(position) - self.first) // PAGE_TOKENS

    def reserve(self, sequence: Sequence, length: int, position: int) -> list[int]:
        """Take the pages for `length` tokens of a sequence, of which those from `position` on are
        still to be evaluated.

        Returns:
            the pages of a tail that begin with rows which no token will be stored in.

        Raises:
            LocalKVError: no page is free.
        """
        pages, gone = sequence.pages[self.index], sequence.gone[self.index]
        n_places, unused = self.n_places(length), list[int]()
        if n_places <= len(pages):
            return unused
        needed = self.first_place(position)
        for place in range(len(pages), n_places):
            if self.kept <= place < needed:
                gone.add(place)
                pages.append(0)
                continue
            if len(pages) - len(gone) >= self.most or not self.free:
                self._give_back_one(sequence, needed)
            pages.append(self.take())
            if self.tail is not None and self.first + place * PAGE_TOKENS < position:
                unused.append(pages[-1])
        return unused

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

        What a tail lacks can be read packed, but for tokens that are not packed yet, those of an
        open group.

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
