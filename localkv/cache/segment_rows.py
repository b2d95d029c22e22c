"""Which rows a segment of a group of layers has, and in which of its pages they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from localkv.cache.layout import PAGE_TOKENS, GroupLayout, SegmentSpec
from localkv.cache.pages import Sequence


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
    """Of a group's segments, whose pools begin with number `first_pool`."""
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
