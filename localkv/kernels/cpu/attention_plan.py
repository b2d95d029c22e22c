"""How the CPU's attention cuts a batch into pieces of work."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

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
from localkv.kernels.cpu.attention_kernels import n_threads
from localkv.kernels.cpu.attention_sizes import BLOCK_ROWS, FEW_ROWS, PIECES_PER_THREAD
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
class Plan:
    """The pieces of work of a batch in one segment, the same for all layers of one window.

    Attributes:
        batch: the batch's share of the segment, for which this is.
        group: query heads of a KV head, which the split into pieces depends on.
        n_kv_heads, n_pages: of the segment's cache.
        visible: int64 [tokens, 2], the first row of the segment that each token sees, and the end.
        sequences, chunks: tables of the decode kernels (see `attention_job`).
        blocks: table of the prefill kernels.
        n_rows, few_tokens: rows of the decode kernels, and rows of K they read.
        complete: every token is part of a piece.
        launches: what was prepared of calls, by all that layers may differ in.
    """

    batch: SegmentBatch
    group: int
    n_kv_heads: int
    n_pages: int
    visible: Table
    sequences: Table
    chunks: Table
    blocks: Table
    n_rows: int
    few_tokens: int
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


def make_plan(
    seg_batch: SegmentBatch, batch: Batch, window: int, group: int, n_kv_heads: int, n_pages: int
) -> Plan:
    """Cut a batch into pieces, enough of them for all threads to be busy to the end.

    `n_pages` and `n_kv_heads` are those of the cache.

    Raises:
        BoundsError: the batch is not of such a cache.
    """
    visible = visible_rows(seg_batch, batch, window)
    check_batch(seg_batch, batch, visible, n_pages)
    table, width = seg_batch.page_table.data_ptr(), seg_batch.page_table.shape[1] * 8
    few, blocks = list[tuple[int, int, int, int, range]](), list[Block]()
    complete = True
    for i, length in enumerate(seg_batch.lengths):
        first, n_new = batch.starts[i], batch.starts[i + 1] - batch.starts[i]
        pages = table + i * width
        begin, end = visible[first, 0], visible[first + n_new - 1, 1]
        if begin >= end:
            complete = False
        elif n_new == 1 or n_new * group <= FEW_ROWS:
            seen = range(int(begin) // PAGE_TOKENS, pages_for(int(end)))
            few.append((first, n_new, pages, length, seen))
        else:
            blocks += row_blocks(first, n_new, group, pages)
    pages_seen = sum(len(seen) for *_, seen in few)
    chunk_pages = max(1, pages_seen * n_kv_heads // (PIECES_PER_THREAD * n_threads()))
    sequences, chunks = list[Sequence](), list[Chunk]()
    for i, (first, n_new, pages, length, seen) in enumerate(few):
        starts = seen[::chunk_pages]
        sequences.append(Sequence(first, n_new, pages, length, len(chunks), len(starts)))
        chunks += [Chunk(i, at, min(chunk_pages, seen.stop - at)) for at in starts]
    n_rows = max((n_new * group for _, n_new, *_ in few), default=0)
    sizes = {"n_tokens": len(visible), "group": group, "n_rows": n_rows}
    check_pieces(sequences, chunks, blocks, **sizes)
    return Plan(
        batch=seg_batch,
        group=group,
        n_kv_heads=n_kv_heads,
        n_pages=n_pages,
        visible=Table(visible),
        sequences=table_of(sequences, SEQUENCE_ITEMS),
        chunks=table_of(chunks, CHUNK_ITEMS),
        blocks=table_of(blocks, BLOCK_ITEMS),
        n_rows=n_rows,
        few_tokens=pages_seen * PAGE_TOKENS,
        complete=complete,
    )
