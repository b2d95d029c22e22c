"""How many rows a sequence has in each segment, and a batch reads and writes there. No torch.

Rows that the tail has as well as the packed segment are counted in both, as they are stored twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from localkv.cache.layout import GroupLayout

Counts = Sequence[int]
"""Rows of each segment of a group of layers."""


def bytes_of(layout: GroupLayout, counts: Counts) -> int:
    """Bytes of so many rows: K and V of all layers and heads of the group."""
    rows = zip(layout.segments, counts, strict=True)
    return sum(n * layout.segment_row_bytes(spec) for spec, n in rows)


def exact_bytes(layout: GroupLayout, counts: Counts) -> int:
    """Those of the rows of a tail and a sink among them."""
    packed = layout.segments.index(layout.packed)
    return bytes_of(layout, [0 if i == packed else n for i, n in enumerate(counts)])


def kept_rows(layout: GroupLayout, n_tokens: int, n_batch: int | None = None) -> list[int]:
    """Rows that a sequence of `n_tokens` has, without the rest of its pages.

    Args:
        n_batch: most tokens of a batch, for layers with a window (`GroupLayout.most_pages`).
    """
    counts, bounds = list[int](), layout.bounds(n_tokens)
    oldest = n_tokens - layout.n_rows(n_tokens, n_batch)
    for spec, (first, end) in zip(layout.segments, bounds, strict=True):
        tail = spec.tail
        if tail is None:
            begin = first if spec is not layout.packed else max(first, oldest)
        elif spec.is_tail:
            begin = max(tail.start, tail.first_needed(n_tokens - 1))
        else:
            begin, end = max(tail.start, oldest), min(end, max(tail.start, tail.whole(n_tokens)))
        counts.append(max(0, min(end, n_tokens) - begin))
    return counts


def read_rows(layout: GroupLayout, n_before: int, n_new: int) -> list[int]:
    """Rows that new tokens behind `n_before` others see, their own included, each once."""
    counts, stop = list[int](), n_before + n_new
    spans, tail = [(n_before, stop - 1)], layout.packed.tail
    if tail is not None and (layout.reach or not tail.newest):
        # rows that leave a window before they are behind the tail are not read packed, nor is the
        # last row of a group read from a tail that has no more than an open group
        spans = [(position, position) for position in range(n_before, stop)]
    for spec, (first, bound) in zip(layout.segments, layout.bounds(stop), strict=True):
        n_rows = done = 0
        for position, last in spans:
            begin, end = max(first, layout.first_visible(position)), min(bound, last + 1)
            if spec.tail is not None and spec.is_tail:
                begin = max(begin, int(spec.tail.begin(position)))
            elif spec.tail is not None:
                end = min(end, int(spec.tail.begin(last)))
            n_rows += max(0, end - max(begin, done))
            done = max(done, end)
        counts.append(n_rows)
    return counts


def written_rows(layout: GroupLayout, n_before: int, n_new: int) -> list[int]:
    """Rows that are stored with new tokens behind `n_before` others: those of whole groups where
    several are packed together."""
    end, counts = n_before + n_new, list[int]()
    for spec, (first, bound) in zip(layout.segments, layout.bounds(end), strict=True):
        tail, begin, last = spec.tail, n_before, end
        if tail is not None:
            first = tail.start
            if not spec.stores_at_once:
                begin, last = max(first, tail.whole(n_before)), tail.whole(end)
        counts.append(max(0, min(bound, last) - max(first, begin)))
    return counts
