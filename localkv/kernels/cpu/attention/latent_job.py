"""The jobs of the CPU's attention over latents: arrays of int64, read as named tuples."""

from __future__ import annotations

from typing import NamedTuple


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
    how many rows, the sequence's page table, the first of its parts' results, how many."""

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


BLOCK_ITEMS, PIECE_ITEMS = len(LatentBlock._fields), len(LatentPiece._fields)
SOFTMAX_SCALE, SOFTCAP = (LatentJob._fields.index(name) for name in ("softmax_scale", "softcap"))
