"""The tokens of one forward pass, and where their rows are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from localkv.cache.arrays import Array
from localkv.cache.tail import Tail

Wanted: TypeAlias = Literal["none", "last", "all"]
"""The new tokens of a sequence whose logits are wanted: none of them in an inner part of a prompt,
the last one of a prompt's end or a generated token, all where drafted tokens are verified."""


@dataclass(frozen=True)
class SegmentBatch:
    """Where the tokens of a batch and their history are, in one segment.

    Attributes:
        page_table: int64 [n_sequences, most pages]; row i lists the pages of sequence i, in order
            of position; entries after its last page are 0, and those of pages that were given back,
            as no token of the batch sees their rows.
        lengths: rows of each sequence that are valid once the batch's own rows are stored.
        length_table: the same, int32 [n_sequences], where the pages are.
        first_position: position of row 0 of the segment.
        first_positions: the same of each sequence, in a segment that is a rung of a ladder, or
            empty. Of rows in full pages it is a position before the batch, not their own.
        first_table: the same, int64 [n_sequences], where the pages are, or None.
        is_empty: no sequence has a row here, and attention leaves the segment out.
        tokens: int64 [n], the batch's tokens whose rows belong to this segment.
        slots: int64 [n], the row of each of them: page * PAGE_TOKENS + offset.
        tail: where tails begin, if a token reads rows of this segment only up to there, or, in the
            segment of the tails themselves (`is_tail`), only from there on.
        exact_from: of each sequence, the position before which no tail begins (see `Sequence`).
        exact_table: the same, int64 [n_sequences], where the pages are.
        groups: int64 [n, 2], the groups of rows that this batch completes and that are packed once
            all of its rows are stored: the slot of a group's first row in this segment, and that in
            the segment of the tails, from where the rows are read. A negative slot is no group
            (`Arrays.place_row`). None where rows are packed one by one.
    """

    page_table: Array
    lengths: tuple[int, ...]
    length_table: Array
    first_position: int
    tokens: Array
    slots: Array
    tail: Tail | None = None
    is_tail: bool = False
    exact_from: tuple[int, ...] = ()
    exact_table: Array | None = None
    groups: Array | None = None
    first_positions: tuple[int, ...] = ()
    first_table: Array | None = None
    is_empty: bool = False

    def first_of(self, sequence: int) -> int:
        """The position of row 0 of a sequence."""
        if self.first_positions:
            return self.first_positions[sequence]
        return self.first_position


@dataclass(frozen=True)
class Batch:
    """The tokens of one forward pass; one sequence is a batch of one.

    Attributes:
        token_ids: int64 [tokens], the sequences one after the other.
        positions: int64 [tokens].
        starts: n_sequences + 1 offsets into `token_ids`.
        start_table: the same, int32 [n_sequences + 1], where the pages are.
        segments: the same tokens as each segment of each group of the cache has them, the groups
            one after the other (`LayerCache.rows_of`).
        logit_rows: int64 [rows], the tokens whose logits are wanted, if any.
        generated: of each sequence, whether its new tokens were generated, not read in a prompt.
            A backend may have kernels for each kind that round differently, but it never chooses by
            the number of tokens: so a prompt gives the same bits in any chunks.
        slots: int64 [n_sequences], the places of the sequences' states in recurrent layers.
    """

    token_ids: Array
    positions: Array
    starts: tuple[int, ...]
    start_table: Array
    segments: tuple[SegmentBatch, ...]
    logit_rows: Array
    generated: tuple[bool, ...]
    slots: Array


def wanted_rows(starts: Sequence[int], wanted: Sequence[Wanted]) -> Iterator[int]:
    """The tokens whose logits are wanted, of sequences whose tokens begin at `starts`."""
    for first, end, which in zip(starts[:-1], starts[1:], wanted, strict=True):
        yield from range({"none": end, "last": end - 1, "all": first}[which], end)
