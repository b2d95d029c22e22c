"""How the CPU's attention over latents cuts a batch into pieces of work."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Batch, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS, pages_for
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.addresses import address
from localkv.kernels.cpu.attention.bounds import check_batch
from localkv.kernels.cpu.attention.latent_job import (
    BLOCK_ITEMS,
    PIECE_ITEMS,
    LatentBlock,
    LatentPiece,
)
from localkv.kernels.cpu.attention.latent_sizes import (
    LATENT_ROWS,
    heads_at_once,
    latent_part_pages,
    most_latent_parts,
)
from localkv.kernels.cpu.attention.plan import Launch, visible_rows
from localkv.kernels.cpu.attention.tables import Int64s, Table, table_of


@dataclass(frozen=True)
class LatentLaunch:
    """Work of one call: tables of the kernel, and results of parts that have to be kept."""

    blocks: Table
    pieces: Table
    n_parts: int


@dataclass(frozen=True)
class LatentPlan:
    """The pieces of work of a batch in one segment, the same for all layers.

    Attributes:
        batch: the batch's share of the segment, for which this is.
        generated: of each sequence, what kind its tokens are of.
        n_heads, n_pages: of queries, and of the segment's cache.
        visible: int64 [tokens, 2], the first row of the segment that each token sees, and the end.
        launches: several where results of parts would take too much memory at once.
        complete: every token is part of a piece.
        calls: what was prepared of launches, by all that layers may differ in.
    """

    batch: SegmentBatch
    generated: tuple[bool, ...]
    n_heads: int
    n_pages: int
    visible: Table
    launches: tuple[LatentLaunch, ...]
    complete: bool
    calls: dict[tuple[object, ...], tuple[Launch, ...]] = field(default_factory=dict)


@dataclass
class _Launch:
    """Blocks and pieces, with no more parts than a launch has memory for."""

    blocks: list[LatentBlock] = field(default_factory=list)
    pieces: list[LatentPiece] = field(default_factory=list)
    n_parts: int = 0

    def add(
        self, token: int, head: int, n_rows: int, table: int, cuts: list[tuple[int, int]]
    ) -> None:
        for part, (at, stop) in enumerate(cuts):
            self.pieces.append(LatentPiece(len(self.blocks), part, at, stop))
        self.blocks.append(LatentBlock(token, head, n_rows, table, self.n_parts, len(cuts)))
        self.n_parts += len(cuts) if len(cuts) > 1 else 0

    def tables(self, n_tokens: int, n_heads: int) -> LatentLaunch:
        sizes = {"n_tokens": n_tokens, "n_heads": n_heads, "n_parts": self.n_parts}
        check_blocks(self.blocks, self.pieces, **sizes)
        blocks, pieces = table_of(self.blocks, BLOCK_ITEMS), table_of(self.pieces, PIECE_ITEMS)
        return LatentLaunch(blocks, pieces, self.n_parts)


def make_latent_plan(
    seg_batch: SegmentBatch, batch: Batch, params: AttentionParams, n_heads: int, n_pages: int
) -> LatentPlan:
    """Cut a batch into blocks of rows, and what those of generated tokens see into parts.

    Where a token's context is cut depends on its kind and on what it sees, and on nothing else.

    Raises:
        BoundsError: the batch is not of a cache of `n_pages`.
    """
    check_batch(seg_batch, batch, n_pages)
    visible = visible_rows(seg_batch, batch, params)
    table, width = address(seg_batch.page_table), seg_batch.page_table.shape[1] * 8
    launches, n_covered = [_Launch()], 0
    for i in range(len(seg_batch.lengths)):
        tokens = range(batch.starts[i], batch.starts[i + 1])
        for run, step in _runs(visible, tokens, generated=batch.generated[i]):
            cuts = _cuts(int(visible[run[0], 0]), int(visible[run[-1], 1]), step)
            n_covered += len(run)
            for block in _row_blocks(run, n_heads):
                if launches[-1].n_parts + len(cuts) > most_latent_parts(n_heads):
                    launches.append(_Launch())
                launches[-1].add(*block, table + i * width, cuts)
    return LatentPlan(
        batch=seg_batch,
        generated=batch.generated,
        n_heads=n_heads,
        n_pages=n_pages,
        visible=Table(visible),
        launches=tuple(
            launch.tables(len(visible), n_heads) for launch in launches if launch.blocks
        ),
        complete=n_covered == len(visible),
    )


def _runs(visible: Int64s, tokens: range, *, generated: bool) -> list[tuple[range, int]]:
    """Tokens of a sequence that are cut alike, and the rows of a part, 0 for one part.

    Those that see nothing are left out. The last ones see most, so they come first.
    """
    steps = []
    for first, end in visible[tokens.start : tokens.stop].tolist():
        seen = pages_for(end) - first // PAGE_TOKENS if first < end else 0
        steps.append(
            latent_part_pages(seen) * PAGE_TOKENS if generated and seen else -1 * (not seen)
        )
    runs, start = [], tokens.start
    for step, same in groupby(steps):
        end = start + len(list(same))
        if step >= 0:
            runs.append((range(start, end), step))
        start = end
    return runs[::-1]


def _cuts(first: int, end: int, step: int) -> list[tuple[int, int]]:
    """Parts of rows `first` to `end`, which begin at multiples of `step`; one for 0."""
    if not step:
        return [(first, end)]
    starts = [max(first, at) for at in range(first // step * step, end, step)]
    return list(zip(starts, [*starts[1:], end], strict=True))


def _row_blocks(tokens: range, n_heads: int) -> list[tuple[int, int, int]]:
    """(token, head, rows): as many tokens as fit, or equal parts of the heads of one."""
    heads, step = heads_at_once(n_heads), max(1, LATENT_ROWS // n_heads)
    blocks = []
    for token in reversed(range(tokens.start, tokens.stop, step)):
        n_rows = min(step, tokens.stop - token) * n_heads
        if step > 1 or heads == n_heads:
            blocks.append((token, 0, n_rows))
        else:
            for head in range(0, n_heads, heads):
                blocks.append((token, head, min(heads, n_heads - head)))
    return blocks


def check_blocks(
    blocks: list[LatentBlock],
    pieces: list[LatentPiece],
    *,
    n_tokens: int,
    n_heads: int,
    n_parts: int,
) -> None:
    """Pieces are of tokens that there are, and their results have room.

    Raises:
        BoundsError: they aren't.
    """
    rows = np.array([block[:3] for block in blocks], dtype=np.int64).reshape(-1, 3)
    first = rows[:, 0] * n_heads + rows[:, 1]
    last = first + rows[:, 2]
    if len(rows) and (
        rows.min() < 0
        or rows[:, 2].min() < 1
        or rows[:, 2].max() > LATENT_ROWS
        or last.max() > n_tokens * n_heads
    ):
        raise BoundsError(f"blocks of up to {rows[:, 2].max()} rows of {n_tokens} tokens")
    for block in blocks:
        if block.n_parts < 1 or (block.n_parts > 1 and block.first_part + block.n_parts > n_parts):
            raise BoundsError(f"{block.n_parts} parts from {block.first_part} on, of {n_parts}")
    for piece in pieces:
        if not (
            0 <= piece.block < len(blocks)
            and 0 <= piece.part < blocks[piece.block].n_parts
            and 0 <= piece.first < piece.end
        ):
            raise BoundsError(f"part {piece.part} of block {piece.block}, of {len(blocks)}")
