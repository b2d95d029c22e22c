"""How the CPU's attention cuts a batch into pieces of work.

Generated tokens take the decode kernels, tokens of prompts the prefill
kernels, which read the whole context of a block of tokens; any blocks give the same.

Where a context is cut into *parts* decides how its sums are rounded. So it depends on what a token
sees, and on nothing else: not on the other tokens, nor on the number of threads. What a thread
takes at once, a *chunk*, is some parts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Batch, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS, pages_for
from localkv.kernels.bounds import BoundsError, check_ids, check_tables
from localkv.kernels.cpu.arrays import address
from localkv.kernels.cpu.attention.jobs import (
    BLOCK_ITEMS,
    CHUNK_ITEMS,
    SEQUENCE_ITEMS,
    TILE_ROWS,
    Block,
    Chunk,
    Sequence,
)
from localkv.kernels.cpu.attention.kernels import whole_tiles
from localkv.kernels.cpu.attention.sizes import (
    BLOCK_ROWS,
    FEW_ROWS,
    LEAST_RUN_ROWS,
    MOST_ROW_PARTS,
    PIECES_PER_THREAD,
    launch_parts,
    part_pages,
)
from localkv.system.threads import n_threads

Int64s = NDArray[np.int64]


class Table:
    """An array of int64 and its address, which NumPy takes a microsecond to tell."""

    def __init__(self, items: Int64s) -> None:
        self.items = np.ascontiguousarray(items)
        self.address = int(self.items.ctypes.data)

    def __len__(self) -> int:
        return len(self.items)


def table_of(rows: Seq[Seq[int]], n_columns: int) -> Table:
    return Table(np.array(rows, dtype=np.int64).reshape(-1, n_columns))


def check_batch(rows: SegmentBatch, batch: Batch, n_pages: int) -> None:
    """Tables are of the batch's sequences, and list pages of a cache of `n_pages`.

    Raises:
        BoundsError: they don't.
    """
    check_tables(rows, batch)
    if any(rows.lengths):  # else no page is read, and there may be none
        check_ids("the page table", rows.page_table, n_pages)


def check_pieces(
    sequences: Seq[Sequence],
    chunks: Seq[Chunk],
    blocks: Seq[Block],
    *,
    n_tokens: int,
    group: int,
    n_rows: int,
    n_parts: int = 0,
) -> None:
    """Pieces are of tokens and pages that there are, and no larger than the scratch that they get.

    Args:
        group: query heads of a KV head.
        n_rows, n_parts: rows and parts that the decode kernels have room for.

    Raises:
        BoundsError: they aren't.
    """
    for token, row, n, _ in blocks:
        if (
            not (token >= 0 and row >= 0 and 0 < n <= BLOCK_ROWS)
            or token * group + row + n > n_tokens * group
        ):
            raise BoundsError(f"a block of {n} rows from row {row} of token {token}")
    for token, n_new, _, length, n_chunks, first, n, *_ in sequences:
        if not (0 <= token < token + n_new <= n_tokens and n_new * group <= n_rows):
            raise BoundsError(f"{n_new} tokens from token {token} on, of {n_tokens}")
        if not 0 <= first < first + n <= n_parts:
            raise BoundsError(f"{n} parts from part {first} on, of {n_parts}")
        if not (length >= 0 and 0 < n_chunks <= len(chunks)):
            raise BoundsError(f"{length} rows in {n_chunks} chunks")
    for of, first, n in chunks:
        if not (0 <= of < len(sequences) and 0 <= first < first + n):
            raise BoundsError(f"{n} pages of sequence {of} from page {first} on")
        parts = range(sequences[of].n_parts)
        at = (page // sequences[of].part_pages for page in (first, first + n - 1))
        if not all(part - sequences[of].skipped_parts in parts for part in at):
            raise BoundsError(f"{n} pages from page {first} on have no parts")
        if (first + n - 1) * PAGE_TOKENS >= sequences[of].length:
            raise BoundsError(f"{n} pages from page {first} on, of {sequences[of].length} rows")


@dataclass(frozen=True)
class Decode:
    """Generated tokens that one launch serves.

    Attributes:
        sequences, chunks: tables of the decode kernels (see `attention/jobs.py`).
        n_parts: of all sequences, for each KV head.
        n_rows: the most rows of a sequence.
        n_tokens: rows of K that are read.
    """

    sequences: Table
    chunks: Table
    n_parts: int
    n_rows: int
    n_tokens: int


@dataclass(frozen=True)
class Run:
    """Generated tokens of a sequence that share parts: their indices, the pages that any of them
    sees, and how many pages a part has."""

    tokens: range
    pages: range
    part_pages: int

    @property
    def parts(self) -> range:
        """Parts of the whole context, so that they begin at the same pages for all tokens; a part
        has nothing of what no token sees."""
        return range(self.pages.start // self.part_pages, -(-self.pages.stop // self.part_pages))


def runs(visible: Int64s, n_kv_heads: int, most: int) -> Iterator[Run]:
    """Runs of at most `most` tokens whose contexts are cut alike; `visible` is the tokens'.

    Tokens that see nothing are left out.
    """
    pages = [
        range(first // PAGE_TOKENS, pages_for(end)) if first < end else range(0)
        for first, end in visible.tolist()
    ]
    steps = [part_pages(len(seen), n_kv_heads) if seen else 0 for seen in pages]
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
    """Some runs, with no more parts than a launch has memory for.

    Attributes:
        group: query heads of a KV head.
        most_tokens: of a run.
    """

    n_kv_heads: int
    group: int
    n_parts: int = 0
    most_tokens: int = 0
    parts: list[tuple[Run, Sequence]] = field(default_factory=list)

    def is_full_with(self, run: Run) -> bool:
        """Whether there is no room for one more; parts of few rows take less."""
        n_parts = (self.n_parts + len(run.parts)) * self.n_kv_heads
        n_rows = whole_tiles(max(self.most_tokens, len(run.tokens)) * self.group, self.group)
        most_rows = max(FEW_ROWS, whole_tiles(self.group, self.group))
        return bool(self.parts) and n_parts * n_rows > launch_parts(self.n_kv_heads) * most_rows

    def add(self, run: Run, first_token: int, table: int, length: int) -> None:
        """Add a run of a sequence with `length` rows and a page table at `table`."""
        sequence = Sequence(
            token=first_token + run.tokens.start,
            n_new=len(run.tokens),
            table=table,
            length=length,
            n_chunks=0,
            first_part=self.n_parts,
            n_parts=len(run.parts),
            skipped_parts=run.parts.start,
            part_pages=run.part_pages,
        )
        self.parts.append((run, sequence))
        self.n_parts += len(run.parts)
        self.most_tokens = max(self.most_tokens, len(run.tokens))

    def tables(self, n_tokens: int) -> Decode:
        """For a batch of `n_tokens`: chunks for all threads to be busy to the end."""
        n_pages = sum(len(run.pages) for run, _ in self.parts)
        most = n_pages * self.n_kv_heads // (PIECES_PER_THREAD * n_threads())
        sequences, chunks = list[Sequence](), list[Chunk]()
        for i, (run, sequence) in enumerate(self.parts):
            step = max(1, most // run.part_pages) * run.part_pages
            first, end = run.pages.start, run.pages.stop
            starts = [max(first, page) for page in range(first - first % step, end, step)]
            sequences.append(sequence._replace(n_chunks=len(starts)))
            ends = (*starts[1:], end)
            chunks += [Chunk(i, at, stop - at) for at, stop in zip(starts, ends, strict=True)]
        n_rows = self.most_tokens * self.group
        sizes = {"n_tokens": n_tokens, "group": self.group, "n_rows": n_rows}
        check_pieces(sequences, chunks, (), n_parts=self.n_parts, **sizes)
        return Decode(
            table_of(sequences, SEQUENCE_ITEMS),
            table_of(chunks, CHUNK_ITEMS),
            self.n_parts,
            n_rows,
            n_pages * PAGE_TOKENS,
        )


MANY_TOKENS = 32
"""Generated tokens of a sequence that are worth decoded tiles; some more than chains of all layers
take at once (`layers/program.py`)."""


@dataclass(frozen=True)
class RunBlocks:
    """Generated tokens that one launch serves.

    Attributes:
        sequences, chunks: a block of tokens each, and the pages that it sees.
        n_rows, n_parts: the most of a block.
    """

    sequences: Table
    chunks: Table
    n_rows: int
    n_parts: int


def block_runs(visible: Int64s, n_kv_heads: int, group: int) -> Iterator[Run]:
    """Tokens of a sequence that share parts, as many as have room for the results of all parts;
    `visible` is the tokens'. Tokens that see nothing are left out."""
    begin, stop = visible[:, 0] // PAGE_TOKENS, -(-visible[:, 1] // PAGE_TOKENS)
    pages = np.where(visible[:, 0] < visible[:, 1], stop - begin, 0)
    steps = {n: part_pages(n, n_kv_heads) if n else 0 for n in np.unique(pages).tolist()}
    each = np.array([steps[n] for n in pages.tolist()])
    # one more for a block that begins within a part, and one as its last token may see another page
    n_parts = max((n // step + 3 for n, step in steps.items() if step), default=1)
    most = min(BLOCK_ROWS, MOST_ROW_PARTS // n_parts // TILE_ROWS * TILE_ROWS) // group
    bounds = [0, *(np.flatnonzero(np.diff(each)) + 1).tolist(), len(each)]
    for start, end in pairwise(bounds):
        step = int(each[start])
        for first in range(start, end, most) if step else ():
            tokens = range(first, min(first + most, end))
            yield Run(tokens, range(int(begin[first]), int(stop[tokens[-1]])), step)


class RunTables:
    """Blocks of a batch, of all its sequences."""

    def __init__(self, n_kv_heads: int, group: int) -> None:
        self.n_kv_heads, self.group = n_kv_heads, group
        self.sequences, self.chunks = list[Sequence](), list[Chunk]()

    def takes(self, n_new: int) -> bool:
        """Whether `n_new` tokens of a sequence are worth it, and rows of a token have room."""
        return n_new >= MANY_TOKENS and self.group <= LEAST_RUN_ROWS

    def add(self, visible: Int64s, first: int, table: int, length: int) -> int:
        """Add the tokens of a sequence with `length` rows and a page table at `table`; how many
        see something."""
        n_seeing = 0
        for run in block_runs(visible, self.n_kv_heads, self.group):
            self.chunks.append(Chunk(len(self.sequences), run.pages.start, len(run.pages)))
            sequence = Sequence(
                token=first + run.tokens.start,
                n_new=len(run.tokens),
                table=table,
                length=length,
                n_chunks=1,
                first_part=0,
                n_parts=len(run.parts),
                skipped_parts=run.parts.start,
                part_pages=run.part_pages,
            )
            self.sequences.append(sequence)
            n_seeing += len(run.tokens)
        return n_seeing

    def tables(self, n_tokens: int) -> RunBlocks | None:
        """The tables of a batch of `n_tokens`; the last blocks see most, so they come first."""
        if not self.sequences:
            return None
        most_rows = max(one.n_new for one in self.sequences) * self.group
        n_rows = -(-most_rows // TILE_ROWS) * TILE_ROWS
        n_parts = max(one.n_parts for one in self.sequences)
        sizes = {"n_tokens": n_tokens, "group": self.group, "n_rows": n_rows, "n_parts": n_parts}
        check_pieces(self.sequences, self.chunks, (), **sizes)
        return RunBlocks(
            table_of(self.sequences, SEQUENCE_ITEMS),
            table_of(self.chunks[::-1], CHUNK_ITEMS),
            n_rows,
            n_parts,
        )


@dataclass(frozen=True)
class Launch:
    """One call of workers, all but the addresses that differ from layer to layer.

    Attributes:
        template: name of the worker's module.
        job: its `Job`.
        threads: how many work on it.
        scratch_floats: memory for `job.scratch`, of all threads.
        partial_floats, done_items: memory for `job.partial` after it, and for `job.done`.
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
    """The pieces of work of a batch in one segment, the same for all layers that see as far back.

    Attributes:
        batch: the batch's share of the segment, for which this is.
        generated: of each sequence, what kind its tokens are of.
        group: query heads of a KV head, which the split into pieces depends on.
        n_kv_heads, n_pages: of the segment's cache.
        visible: int64 [tokens, 2], the first row of the segment that each token sees, and the end.
        in_blocks: many generated tokens of a sequence are cut into blocks.
        decodes: the work of the decode kernels.
        run_blocks: the call for blocks of generated tokens, if there are some.
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
    in_blocks: bool
    decodes: tuple[Decode, ...]
    run_blocks: RunBlocks | None
    blocks: Table
    complete: bool
    launches: dict[LaunchKey, tuple[Launch, ...]] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.group, self.n_kv_heads, self.n_pages


def visible_rows(seg_batch: SegmentBatch, batch: Batch, params: AttentionParams) -> Int64s:
    """int64 [tokens, 2], the first row of the segment that each token sees, and the end."""
    end, first = batch.positions + 1, params.first_visible(batch.positions)
    n_new = np.diff(batch.starts)
    if seg_batch.tail is not None:
        begin = seg_batch.tail.begin(batch.positions)
        begin = np.maximum(begin, np.repeat(seg_batch.exact_from, n_new))
        if seg_batch.is_tail:
            first = np.maximum(first, begin)
        else:
            end = np.minimum(end, begin)
    lengths = np.repeat(seg_batch.lengths, n_new)
    rows = np.stack((first, end), axis=1) - seg_batch.first_position
    if seg_batch.first_positions:
        rows -= np.repeat(seg_batch.first_positions, n_new)[:, None]
    return rows.clip(0, lengths[:, None])


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
    seg_batch: SegmentBatch,
    batch: Batch,
    params: AttentionParams,
    group: int,
    n_kv_heads: int,
    n_pages: int,
    *,
    in_blocks: bool,
) -> Plan:
    """Cut a batch into pieces, enough of them for all threads to be busy to the end.

    `n_pages` and `n_kv_heads` are the cache's; `in_blocks` says that its types have blocks
    of generated tokens.

    Raises:
        BoundsError: the batch is not of such a cache.
    """
    check_batch(seg_batch, batch, n_pages)
    visible = visible_rows(seg_batch, batch, params)
    table, width = address(seg_batch.page_table), seg_batch.page_table.shape[1] * 8
    splits, blocks, n_covered = [Splits(n_kv_heads, group)], list[Block](), 0
    tables = RunTables(n_kv_heads, group)
    for i, length in enumerate(seg_batch.lengths):
        first, n_new = batch.starts[i], batch.starts[i + 1] - batch.starts[i]
        pages = table + i * width
        if batch.generated[i]:
            seen = visible[first : first + n_new]
            if in_blocks and tables.takes(n_new):
                n_covered += tables.add(seen, first, pages, length)
                continue
            for run in runs(seen, n_kv_heads, max(1, FEW_ROWS // group)):
                if splits[-1].is_full_with(run):
                    splits.append(Splits(n_kv_heads, group))
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
        in_blocks=in_blocks,
        run_blocks=tables.tables(len(visible)),
        decodes=tuple(split.tables(len(visible)) for split in splits if split.parts),
        blocks=table_of(blocks, BLOCK_ITEMS),
        complete=n_covered == len(visible),
    )
