"""What the workers of the CPU's products are told: arrays of int64, whose items these are."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.formats.cpu.panel_layout import BLOCK
from localkv.kernels.cpu.linear.panel_bytes import IN_PLACE_FORMAT_NAMES
from localkv.simd.cpu_features import HAS_AVX512, HAS_VNNI
from localkv.simd.memory import get_i64

MAX_TILE = 8 if HAS_VNNI else 4
"""Tokens of the largest tile of panels: as many as there are registers for."""

TILE_ROWS, MAX_TILE_TOKENS = (4, 6) if HAS_AVX512 else (2, 2)
"""Rows as in the file, and tokens, that meet in the largest tile: as many sums as registers."""

ACTIVATION_BLOCK_BYTES = BLOCK + 16 if HAS_VNNI else 4 * (BLOCK + 1)
"""Bytes of a token's packed activations for `BLOCK` columns."""

IN_PLACE_FORMATS = IN_PLACE_FORMAT_NAMES if HAS_VNNI else ()
"""The formats whose matrices stay in the file on this CPU."""

NEXT = 0
"""The first item of every job: the counter by which threads share out the work."""

# a packer's: float32 x [n_tokens, n_in] becomes packed activations of `n_blocks` blocks a token;
# a piece of work is a token's blocks, or `PART_BLOCKS` of them
PACK_TOKENS, PACK_N_IN, PACK_BLOCKS, PACK_PARTS, PACK_X, PACK_OUT, PACK_ITEMS = range(1, 8)
PART_BLOCKS = 64

# a multiplier's: what matrices of one format and width share. The activations are packed, of
# `TOKEN_BYTES` a token, or rows of float32. A piece of work is a chunk of `CHUNK` panels or rows.
# Panels of `PANEL_BYTES` that are made on the way are in the thread's part of the memory at
# `PANELS`, `GROUP` of them at a time.
N_TOKENS, N_IN, N_RECORDS, TOKEN_BYTES, ACTIVATIONS, CHUNK = range(1, 7)
PANEL_BYTES, GROUP, PANELS, N_MATRICES, MATRICES = range(7, 12)
# then, for each matrix: its address, bytes of a panel or row, panels or rows, rows; float32 out
# [n_tokens, n_out]; what is added to it (or 0), and the bytes from token to token in that
DATA, ITEM_BYTES, N_ITEMS, N_OUT, OUT, ADDEND, ADDEND_STRIDE, MATRIX_ITEMS = range(8)


@njit
def find_chunk(job: Any, number: int) -> tuple[Any, int, int]:
    """Address of a matrix's items, and the first and the end of its panels or rows.

    The address is 0 if all is done.
    """
    chunk = get_i64(job, CHUNK)
    for i in range(get_i64(job, N_MATRICES)):
        matrix = job + 8 * (MATRICES + i * MATRIX_ITEMS)
        n_items = get_i64(matrix, N_ITEMS)
        n_chunks = (n_items + chunk - 1) // chunk
        if number < n_chunks:
            return matrix, number * chunk, min(number * chunk + chunk, n_items)
        number -= n_chunks
    return 0, 0, 0


@njit
def tile_size(start: Any, n_tokens: Any) -> Any:
    """Tokens of the tile of panels that starts at token `start`: large ones first, then 4, 2, 1."""
    left = n_tokens - start
    if left >= MAX_TILE:
        return MAX_TILE
    if left >= 4:
        return 4
    return 2 if left >= 2 else 1


@njit
def tile_start(token: Any, n_tokens: Any) -> Any:
    """First token of the tile of panels that holds `token`."""
    start = n_tokens // MAX_TILE * MAX_TILE
    if token < start:
        return token // MAX_TILE * MAX_TILE
    size = tile_size(start, n_tokens)
    while start + size <= token:
        start += size
        size = tile_size(start, n_tokens)
    return start
