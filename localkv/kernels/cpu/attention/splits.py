"""How the contexts of generated tokens are split, among threads and for rounding.

Where a context is cut into *parts* decides how its sums are rounded. So it depends on what a token
sees, and on nothing else: not on the other tokens, nor on the number of threads. What a thread
takes at once, a *chunk*, is some parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from localkv.cache.layout import PAGE_TOKENS, pages_for
from localkv.kernels.cpu.attention.bounds import check_pieces
from localkv.kernels.cpu.attention.job import CHUNK_ITEMS, SEQUENCE_ITEMS, Chunk, Sequence
from localkv.kernels.cpu.attention.launch_sizes import launch_parts
from localkv.kernels.cpu.attention.row_tiles import whole_tiles
from localkv.kernels.cpu.attention.sizes import (
    FEW_ROWS,
    PIECES_PER_THREAD,
    part_pages,
)
from localkv.kernels.cpu.attention.tables import Int64s, Table, table_of
from localkv.system.threads import n_threads


@dataclass(frozen=True)
class Decode:
    """Generated tokens that one launch serves.

    Attributes:
        sequences, chunks: tables of the decode kernels (see `attention/job.py`).
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
        """Of the whole context's. So they begin at the same pages for all tokens; of what is no
        token's a part has nothing."""
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
