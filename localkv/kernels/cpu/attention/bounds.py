"""What the CPU's attention is given, checked before a plan is made of it: once for all layers."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from localkv.cache.arrays import Batch, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.bounds import BoundsError, check_ids, check_tables
from localkv.kernels.cpu.attention.job import Block, Chunk, Sequence
from localkv.kernels.cpu.attention.sizes import BLOCK_ROWS


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
