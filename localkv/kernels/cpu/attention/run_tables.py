"""Which blocks of generated tokens `attention/run_blocks.py` works on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.bounds import check_pieces
from localkv.kernels.cpu.attention.job import (
    CHUNK_ITEMS,
    SEQUENCE_ITEMS,
    TILE_ROWS,
    Chunk,
    Sequence,
)
from localkv.kernels.cpu.attention.sizes import (
    BLOCK_ROWS,
    LEAST_RUN_ROWS,
    MOST_ROW_PARTS,
    part_pages,
)
from localkv.kernels.cpu.attention.splits import Run
from localkv.kernels.cpu.attention.tables import Int64s, Table, table_of

MANY_TOKENS = 32
"""Generated tokens of a sequence that are worth decoded tiles; some more than chains of all layers
take at once (`token_program.py`)."""


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
    """Tokens of a sequence that share parts, so many as have room for the results of all parts;
    `visible` is the tokens'. Those that see nothing are left out."""
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
        """Whether a sequence with so many new tokens is worth it, and rows of a token have room."""
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
        """Of a batch of `n_tokens`; the last blocks see most, so they come first."""
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
