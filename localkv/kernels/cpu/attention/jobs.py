"""The jobs of the CPU's attention workers: arrays of int64, read as named tuples.

All kinds of worker (`attention/decode.py`, `attention/prefill.py`, `attention/many.py`) get the
same `Job`; what only one of them reads is 0 for the others. Addresses are int64, too.
"""

from __future__ import annotations

from typing import NamedTuple

from localkv.kernels.cpu.attention.sizes import MOST_TILE_ROWS
from localkv.simd.cpu_features import HAS_AVX512

TILE_ROWS, TILE_VECTORS = (MOST_TILE_ROWS, 2) if HAS_AVX512 else (6, 1)
"""Rows and vectors whose products are in registers at once; the rows divide BLOCK_ROWS."""


PLANE, OF_HEAD, OF_PAGE = 3, 1, 2
"""Items of a plane in a table of planes, and which of them are the bytes of a page's KV head, and
those from page to page."""


class Job(NamedTuple):
    """One call.

    Attributes:
        next_piece, n_pieces: the piece of work to take next, and how many there are.
        n_kv_heads, group, head_dim: sizes; `group` query heads share a KV head.
        softmax_scale, softcap: the bits of these float32 (see `AttentionParams`).
        k_block, v_block: values per block of the types.
        k_affine: K's type has minima (decode).
        k_digits, k_offset: K's kernel takes queries as digits, and codes that are so much too large
            (decode).
        k_outliers: K's kernel takes queries as floats, too, in place of sums (decode).
        k_ahead, v_ahead: cache lines to fetch at a time during the other side's kernel (decode).
        k_early, v_early: those to fetch before, during the side's own kernel (decode).
        k_kernel, v_kernel: addresses of the sides' kernels.
        q, out, lse: float32 [tokens, n_heads, head_dim], the same, float32 [tokens, n_heads].
        visible: int64 [tokens, 2], the first row of the segment that a token sees, and the end.
        pieces: the table of pieces; each has n_kv_heads items.
        sequences: the table of sequences (decode, blocks of runs).
        k_planes, v_planes: int64 [6, 3], see `packed_attention.plane_table`.
        scratch, scratch_floats: memory of the threads (`BlockScratch`, `RowScratch` or
            `RunBlockScratch`), and how much each has.
        n_rows, n_tiles: rows of a sequence, padded to tiles, and tiles (decode).
        n_parts: of all sequences, for each KV head (decode); of a block at most (blocks of runs).
        partial: results of parts, [n_parts, n_kv_heads] of `PartResult` (decode).
        done: int64 [sequences, n_kv_heads], chunks that are done (decode).
    """

    next_piece: int
    n_pieces: int
    n_kv_heads: int
    group: int
    head_dim: int
    softmax_scale: int
    softcap: int
    k_block: int
    v_block: int
    k_affine: int
    k_digits: int
    k_offset: int
    k_outliers: int
    k_ahead: int
    v_ahead: int
    k_early: int
    v_early: int
    k_kernel: int
    v_kernel: int
    q: int
    out: int
    lse: int
    visible: int
    pieces: int
    sequences: int
    k_planes: int
    v_planes: int
    scratch: int
    scratch_floats: int
    n_rows: int
    n_tiles: int
    n_parts: int
    partial: int
    done: int


class Sequence(NamedTuple):
    """Generated tokens of a sequence: the first one, how many, their page table, its rows; how many
    chunks they take. Then the context's parts, whose sums are rounded separately: the first,
    counted from that of the first sequence; how many; how many come before them in the context; and
    how many pages one has."""

    token: int
    n_new: int
    table: int
    length: int
    n_chunks: int
    first_part: int
    n_parts: int
    skipped_parts: int
    part_pages: int


class Chunk(NamedTuple):
    """Pages of a sequence that one thread takes at once: whole parts."""

    sequence: int
    first_page: int
    n_pages: int


class Block(NamedTuple):
    """Rows of a sequence that are taken at once, at most BLOCK_ROWS: which token and which of its
    rows is the first (see `queries.row_index`), how many, and its page table."""

    token: int
    row: int
    n_rows: int
    table: int


SEQUENCE_ITEMS, CHUNK_ITEMS, BLOCK_ITEMS = (len(kind._fields) for kind in (Sequence, Chunk, Block))
SOFTMAX_SCALE, SOFTCAP = (Job._fields.index(name) for name in ("softmax_scale", "softcap"))
