"""How the CPU's attention cuts a batch into pieces of work.

Generated tokens take the decode kernels (`attention/splits.py`), those of prompts the prefill
kernels, which read the whole context of a block of tokens; any blocks give the same.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Batch, SegmentBatch
from localkv.kernels.cpu.addresses import address
from localkv.kernels.cpu.attention.bounds import check_batch, check_pieces
from localkv.kernels.cpu.attention.job import BLOCK_ITEMS, Block
from localkv.kernels.cpu.attention.run_tables import RunBlocks, RunTables
from localkv.kernels.cpu.attention.sizes import BLOCK_ROWS, FEW_ROWS
from localkv.kernels.cpu.attention.splits import Decode, Splits, runs
from localkv.kernels.cpu.attention.tables import Int64s, Table, table_of


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
        run_blocks: that of blocks of generated tokens, if there are some.
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

    `n_pages` and `n_kv_heads` are those of the cache; `in_blocks` says that its types have blocks
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
