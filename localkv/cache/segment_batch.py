"""Which rows of a segment the tokens of a batch read, and which they write."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from localkv.cache.arrays import Arrays
from localkv.cache.batch import SegmentBatch
from localkv.cache.pages import Sequence
from localkv.cache.segment_rows import SegmentRows


def segment_batch(
    rows: SegmentRows,
    parts: Seq[tuple[Sequence, Seq[int]]],
    starts: Seq[int],
    arrays: Arrays,
) -> SegmentBatch:
    """A batch's part in a segment whose pages keep their types.

    Args:
        parts: sequences and their new token ids.
        starts: of each sequence the index of its first token in the batch.
        arrays: where the tables live.
    """
    lengths, tokens, slots = [], [], []
    groups, exact_from = list[tuple[int, int]](), list[int]()
    for (sequence, ids), start in zip(parts, starts, strict=False):
        end = sequence.length + len(ids)
        lengths.append(rows.n_seen(sequence, end))
        exact_from.append(rows.exact_from(sequence))
        groups += rows.new_groups(sequence, end)
        for position, slot in rows.new_slots(sequence, end):
            tokens.append(start + position - sequence.length)
            slots.append(slot)
    tables = [sequence.pages[rows.pool] for sequence, _ in parts]
    width = max(1, *(len(table) for table in tables)) if tables else 1
    padded = [table + [0] * (width - len(table)) for table in tables]
    tail = rows.spec.tail
    return SegmentBatch(
        page_table=arrays.int64(padded),
        lengths=tuple(lengths),
        length_table=arrays.int32(lengths),
        first_position=rows.first,
        tokens=arrays.int64(tokens),
        slots=arrays.int64(slots),
        tail=tail,
        is_tail=rows.spec.is_tail,
        exact_from=tuple(exact_from) if tail else (),
        exact_table=arrays.int64(exact_from) if tail else None,
        groups=None if rows.spec.stores_at_once else arrays.int64(groups).reshape(len(groups), 2),
    )
