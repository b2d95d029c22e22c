"""What the CPU's attention workers are told: one array of int64, whose items these are.

Both kinds of worker (`cpu_attention_rows`, `cpu_attention_blocks`) read the same items.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.simd.memory import get_i64

# fmt: off
(NEXT, N_ITEMS,  # the piece of work to take next, and how many there are
 N_KV_HEADS, GROUP, HEAD_DIM,
 SCALE,  # the bits of the softmax scale, a float32
 K_BLOCK, V_BLOCK,  # values per block of the types
 SCRATCH_FLOATS,  # floats of scratch memory per thread
 N_ROWS, N_TILES,  # rows of a sequence, padded to tiles; tiles (decode only)
 K_AFFINE,  # K's type has minima (decode only)
 K_AHEAD, V_AHEAD,  # cache lines to fetch at a time (decode only)
 K_KERNEL, V_KERNEL,  # this and all that follow are addresses
 Q, OUT, LSE,  # float32 [tokens, n_heads, head_dim], the same, float32 [tokens, n_heads]
 PIECES,  # the table of pieces, for each of which there are n_kv_heads items
 SEQUENCES,  # the table of sequences (decode only)
 VISIBLE,  # how many rows of the segment each token sees, int64 [tokens]
 K_PLANES, V_PLANES,  # int64 [4, 2]: address, bytes per page and KV head
 SCRATCH, PARTIAL, DONE,
 JOB_ITEMS) = range(28)

# columns of the table of sequences (decode): its first token and how many are new, the address of
# its page table, its rows, the number of its first chunk and how many it has
SEQ_TOKEN, SEQ_NEW, SEQ_TABLE, SEQ_LENGTH, SEQ_FIRST_CHUNK, SEQ_CHUNKS, SEQ_COLUMNS = range(7)
# columns of the table of chunks (decode): the sequence, the first page, how many pages
CHUNK_SEQ, CHUNK_PAGE, CHUNK_PAGES, CHUNK_COLUMNS = range(4)
# columns of the table of blocks (prefill): first token, how many, page table, rows of the sequence
BLOCK_TOKEN, BLOCK_TOKENS, BLOCK_TABLE, BLOCK_LENGTH, BLOCK_COLUMNS = range(5)
# fmt: on


@njit
def region(planes: Any, plane: int, place: int) -> Any:
    """The address of a page and KV head (`place` counts those) in one plane."""
    return get_i64(planes, plane * 2) + place * get_i64(planes, plane * 2 + 1)
