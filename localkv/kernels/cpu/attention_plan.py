"""How the CPU's attention cuts a batch into pieces of work.

Where a generated token's context is cut decides how its sums are rounded. So it depends on what the
token sees, and on nothing else: not on the other tokens, nor on the number of threads. A prompt's
context is not cut, and its blocks of tokens may be any.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from localkv.cache_layout import PAGE_TOKENS, pages_for
from localkv.config import AttentionParams
from localkv.kernels.cpu.attention_bounds import check_batch, check_pieces
from localkv.kernels.cpu.attention_job import (
    BLOCK_ITEMS,
    CHUNK_ITEMS,
    SEQUENCE_ITEMS,
    Block,
    Chunk,
    Sequence,
)
from localkv.kernels.cpu.attention_sizes import (
    BLOCK_ROWS,
    FEW_ROWS,
    chunk_pages,
    most_pieces,
)
from localkv.kv_cache import Batch, SegmentBatch

Int64s = NDArray[np.int64]


class Table:
    """An array of int64 and its address, which NumPy takes a microsecond to tell."""

    def __init__(self, items: Int64s) -> None:
        self.items = np.ascontiguousarray(items)
        self.address = int(self.items.ctypes.data)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Launch:
    """One call of workers, all but the addresses that differ from layer to layer.

    Attributes:
        template: name of the worker's module.
        job: its `Job`.
        threads: how many work on it.
        scratch_floats: memory for `job.scratch`, of all threads.
        partial_floats, done_items: memory for `job.partial` behind it, and for `job.done`.
    """

    template: str
    job: array[int]
    threads: int
    scratch_floats: int
    partial_floats: int = 0
    done_items: int = 0


LaunchKey = tuple[str, str, int, AttentionParams]
"""Types of K and V, head_dim, params."""


@dataclass(frozen=True)
class Decode:
    """Generated tokens of which one launch takes care.

    Attributes:
        sequences, chunks: tables of the decode kernels (see `attention_job`).
        n_rows: the most rows of a sequence.
        n_tokens: rows of K that are read.
    """

    sequences: Table
    chunks: Table
    n_rows: int
    n_tokens: int


@dataclass(frozen=True)
class Plan:
    """The pieces of work of a batch in one segment, the same for all layers of one window.

    Attributes:
        batch: the batch's share of the segment, for which this is.
        generated: of each sequence, what kind its tokens are of.
        group: query heads of a KV head, which the split into pieces depends on.
        n_kv_heads, n_pages: of the segment's cache.
        visible: int64 [tokens, 2], the first row of the segment that each token sees, and the end.
        decodes: the work of the decode kernels.
        blocks: table of the prefill kernels.
        complete: every token is part of a piece.
        launches: what was prepared of calls, by all that layers may differ in.
    """

    batch: SegmentBatch
    generated: tuple[bool, ...]
    group: int
    n_kv_heads: int
    n_pages: int
    visible: Table
    decodes: tuple[Decode, ...]
    blocks: Table
    complete: bool
    launches: dict[LaunchKey, tuple[Launch, ...]] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.group, self.n_kv_heads, self.n_pages


def table_of(rows: Seq[Seq[int]], n_columns: int) -> Table:
    return Table(np.array(rows, dtype=np.int64).reshape(-1, n_columns))


def visible_rows(seg_batch: SegmentBatch, batch: Batch, window: int) -> Int64s:
    """int64 [tokens, 2], the first row of the segment that each token sees, and the end."""
    end = batch.positions.numpy() + 1 - seg_batch.first_position
    first = end - window if window else np.zeros_like(end)
    lengths = np.repeat(seg_batch.lengths, np.diff(batch.starts))
    return np.stack((first, end), axis=1).clip(0, lengths[:, None])


def row_blocks(first: int, n_new: int, group: int, pages: int) -> list[Block]:
    """Blocks of a sequence with `n_new` tokens from token `first` on: as many tokens as fit, or
    parts of the `group` rows of one. The last ones see most, so they come first."""
    blocks, step = list[Block](), max(1, BLOCK_ROWS // group)
    for at in reversed(range(0, n_new, step)):
        n_rows = min(step, n_new - at) * group
        for row in range(0, n_rows, BLOCK_ROWS):
            blocks.append(Block(first + at, row, min(BLOCK_ROWS, n_rows - row), pages))
    return blocks


@dataclass(frozen=True)
class Run:
    """Generated tokens of a sequence that share pieces: their indices, the pages that any of them
    sees, and how many of these a piece has."""

    tokens: range
    pages: range
    chunk_pages: int

    @property
    def starts(self) -> list[int]:
        """The first pages of pieces: those of whole pieces are the same for all tokens."""
        first = self.pages.start
        whole = range(first - first % self.chunk_pages, self.pages.stop, self.chunk_pages)
        return [max(first, page) for page in whole]


def runs(visible: Int64s, n_kv_heads: int, most: int) -> Iterator[Run]:
    """Runs of at most `most` tokens whose contexts are cut alike; `visible` is the tokens'.

    Tokens that see nothing are left out.
    """
    pages = [range(first // PAGE_TOKENS, pages_for(end)) for first, end in visible.tolist()]
    steps = [chunk_pages(len(seen), n_kv_heads) if seen else 0 for seen in pages]
    start = 0
    for step, same in groupby(steps):
        end = start + len(list(same))
        for first in range(start, end, most) if step else ():
            tokens = range(first, min(first + most, end))
            seen = range(pages[tokens[0]].start, pages[tokens[-1]].stop)
            yield Run(tokens, seen, step)
        start = end


@dataclass
class Splits:
    """The pieces of some runs."""

    sequences: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def pieces_with(self, run: Run, n_kv_heads: int) -> int:
        return (len(self.chunks) + len(run.starts)) * n_kv_heads

    def add(self, run: Run, first_token: int, pages: int, length: int) -> None:
        """Add a run of a sequence of `length` rows whose page table is at `pages`."""
        starts, index = run.starts, len(self.sequences)
        token, n_tokens = first_token + run.tokens.start, len(run.tokens)
        at = len(self.chunks)
        self.sequences.append(Sequence(token, n_tokens, pages, length, at, len(starts)))
        ends = (*starts[1:], run.pages.stop)
        self.chunks += [Chunk(index, at, end - at) for at, end in zip(starts, ends, strict=True)]

    def tables(self, group: int, n_tokens: int) -> Decode:
        """For a batch of `n_tokens`."""
        n_rows = max(sequence.n_new for sequence in self.sequences) * group
        sizes = {"n_tokens": n_tokens, "group": group, "n_rows": n_rows}
        check_pieces(self.sequences, self.chunks, (), **sizes)
        return Decode(
            table_of(self.sequences, SEQUENCE_ITEMS),
            table_of(self.chunks, CHUNK_ITEMS),
            n_rows,
            sum(chunk.n_pages for chunk in self.chunks) * PAGE_TOKENS,
        )


def make_plan(
    seg_batch: SegmentBatch, batch: Batch, window: int, group: int, n_kv_heads: int, n_pages: int
) -> Plan:
    """Cut a batch into pieces, enough of them for all threads to be busy to the end.

    `n_pages` and `n_kv_heads` are those of the cache.

    Raises:
        BoundsError: the batch is not of such a cache.
    """
    check_batch(seg_batch, batch, n_pages)
    visible = visible_rows(seg_batch, batch, window)
    table, width = seg_batch.page_table.data_ptr(), seg_batch.page_table.shape[1] * 8
    most = most_pieces(n_kv_heads)
    splits, blocks, n_covered = [Splits()], list[Block](), 0
    for i, length in enumerate(seg_batch.lengths):
        first, n_new = batch.starts[i], batch.starts[i + 1] - batch.starts[i]
        pages = table + i * width
        if batch.generated[i]:
            seen = visible[first : first + n_new]
            for run in runs(seen, n_kv_heads, max(1, FEW_ROWS // group)):
                if splits[-1].chunks and splits[-1].pieces_with(run, n_kv_heads) > most:
                    splits.append(Splits())
                splits[-1].add(run, first, pages, length)
                n_covered += len(run.tokens)
        elif visible[first, 0] < visible[first + n_new - 1, 1]:
            blocks += row_blocks(first, n_new, group, pages)
            n_covered += n_new
    check_pieces((), (), blocks, n_tokens=len(visible), group=group, n_rows=0)
    return Plan(
        batch=seg_batch,
        generated=batch.generated,
        group=group,
        n_kv_heads=n_kv_heads,
        n_pages=n_pages,
        visible=Table(visible),
        decodes=tuple(split.tables(group, len(visible)) for split in splits if split.chunks),
        blocks=table_of(blocks, BLOCK_ITEMS),
        complete=n_covered == len(visible),
    )
