"""The jobs of the CPU's attention workers: arrays of int64, read as named tuples.

All kinds of worker for K and V (`attention/decode.py`, `attention/prefill.py`, `attention/many.py`)
get the same `Job`; what only one of them reads is 0 for the others. Workers of latents get
`LatentJob`. Addresses are int64, too.
"""

from __future__ import annotations

from typing import NamedTuple

from localkv.kernels.cpu.attention.sizes import LANES, LEAST_PARTS, MOST_TILE_ROWS, TILE
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
        rows_apart: the kernels begin in a page at a multiple of this number of rows (decode,
            blocks of runs).
        q, out, lse: float32 [tokens, n_heads, head_dim], the same, float32 [tokens, n_heads].
        slopes, ramp: ALiBi's float32 [n_heads], and 0, 1, 2, ... for a page; or 0.
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
    rows_apart: int
    q: int
    out: int
    lse: int
    slopes: int
    ramp: int
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
    chunks they take. Then the context's parts, whose sums are rounded separately. The first is
    counted from the first sequence's. Then come how many they are, how many come before them in the
    context, and how many pages one has."""

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


class LatentJob(NamedTuple):
    """One call.

    Attributes:
        next_piece, n_pieces: the piece of work to take next, and how many there are.
        n_heads, latent_dim, rope_dim: sizes.
        softmax_scale, softcap: the bits of these float32 (see `AttentionParams`).
        latent_block, rope_block: values per block of the types.
        latent_kernel, rope_kernel: addresses of the functions that decode tiles.
        q, q_rotated: float32 [tokens, n_heads, latent_dim] and [tokens, n_heads, rope_dim].
        out, lse: float32 [tokens, n_heads, latent_dim] and [tokens, n_heads].
        visible: int64 [tokens, 2], the first row of the segment that a token sees, and the end.
        pieces, blocks: the tables of both.
        latent_planes, rope_planes: int64 [5, 2], address of a plane and its bytes per page.
        scratch, scratch_floats: memory of the threads (`LatentScratch`), and how much each has.
        n_rows: rows of a block, padded to tiles.
        partial, done: results of parts, and int64 [blocks], parts that are done.
    """

    next_piece: int
    n_pieces: int
    n_heads: int
    latent_dim: int
    rope_dim: int
    softmax_scale: int
    softcap: int
    latent_block: int
    rope_block: int
    latent_kernel: int
    rope_kernel: int
    q: int
    q_rotated: int
    out: int
    lse: int
    visible: int
    pieces: int
    blocks: int
    latent_planes: int
    rope_planes: int
    scratch: int
    scratch_floats: int
    n_rows: int
    partial: int
    done: int


class LatentBlock(NamedTuple):
    """Rows of a sequence that are taken at once: which token and which of its heads is the first,
    and how many rows. Then the sequence's page table, the first of its parts' results, and how
    many."""

    token: int
    head: int
    n_rows: int
    table: int
    first_part: int
    n_parts: int


class LatentPiece(NamedTuple):
    """A part of what a block sees: which block and which part, and rows of the cache."""

    block: int
    part: int
    first: int
    end: int


LATENT_BLOCK_ITEMS, PIECE_ITEMS = len(LatentBlock._fields), len(LatentPiece._fields)
LATENT_SOFTMAX_SCALE, LATENT_SOFTCAP = (
    LatentJob._fields.index(name) for name in ("softmax_scale", "softcap")
)


LATENT_ROWS = 64
"""Rows (new token, query head) that share a decoded tile, at most."""
LEAST_PART_PAGES = 2
"""Pages of a part of a generated token's context at least: a part's sums are as wide as all heads,
so they are worth it only after some rows."""


class LatentScratch(NamedTuple):
    """Scratch memory of a thread: where each array starts, in floats.

    Attributes:
        q: [rows, latent_dim + rope_dim].
        out: [rows, latent_dim], sums of weighted latents.
        k: [latent_dim + rope_dim, TILE], decoded rows of the cache, transposed.
        v: [latent_dim / LANES, TILE, LANES], the latents once more.
        rotated: [TILE, rope_dim], decoded.
        logits: [tile_rows, TILE], then what they become as weights.
        totals: [rows, LANES], sums of exponentials.
        scales: [4, LANES], of those who decode, and who transpose.
        references: [rows], see `attention/softmax.py`.
        end: where the next thread's may start, a cache line further.
    """

    q: int
    out: int
    k: int
    v: int
    rotated: int
    logits: int
    totals: int
    scales: int
    references: int
    end: int


def latent_scratch(n_rows: int, tile_rows: int, latent_dim: int, rope_dim: int) -> LatentScratch:
    """For blocks of `n_rows` rows, a multiple of `tile_rows`. Compiled kernels call this, too."""
    width = latent_dim + rope_dim
    out = n_rows * width
    k = out + n_rows * latent_dim
    v = k + width * TILE
    rotated = v + latent_dim * TILE
    logits = rotated + rope_dim * TILE
    totals = logits + tile_rows * TILE
    scales = totals + n_rows * LANES
    references = scales + 4 * LANES
    end = references + n_rows + LANES
    return LatentScratch(0, out, k, v, rotated, logits, totals, scales, references, end)


def part_floats(n_rows: int, latent_dim: int) -> int:
    """Floats of a part's result: sums [n_rows, latent_dim], references, totals of exponentials."""
    return n_rows * (latent_dim + 2)


def most_latent_floats(n_heads: int, latent_dim: int, rope_dim: int, n_threads: int) -> int:
    """Scratch memory of any call."""
    rows = -(-LATENT_ROWS // MOST_TILE_ROWS) * MOST_TILE_ROWS
    per_thread = latent_scratch(rows, MOST_TILE_ROWS, latent_dim, rope_dim).end
    return n_threads * per_thread + most_latent_parts(n_heads) * part_floats(rows, latent_dim)


def most_latent_parts(n_heads: int) -> int:
    """Parts of all blocks that are enough for any token; no launch has more for several."""
    return 2 * LEAST_PARTS * (n_heads // heads_at_once(n_heads))


def latent_part_pages(n_pages: int) -> int:
    """Pages of a part, of the `n_pages` that a generated token sees. Nothing else may decide."""
    return max(LEAST_PART_PAGES, n_pages // LEAST_PARTS)


def rows_of_tile(n_heads: int, most: int) -> int:
    """Rows of equal tiles, of at most `most` rows, that hold a token's heads, or a part of them
    that is taken at once."""
    rows = heads_at_once(n_heads)
    return -(-rows // -(-rows // most))


def heads_at_once(n_heads: int) -> int:
    """Heads of a token in a block: all, or an equal part of them."""
    return -(-n_heads // -(-n_heads // LATENT_ROWS))


def padded_rows(n_heads: int, tile_rows: int) -> int:
    """Rows of the largest block, padded to tiles."""
    heads = heads_at_once(n_heads)
    rows = heads * max(1, LATENT_ROWS // n_heads)
    return -(-rows // tile_rows) * tile_rows
