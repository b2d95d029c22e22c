"""The worker of products with rows as in the file, compiled for each of their formats.

Chunks of rows go to threads; a thread multiplies its chunk with all tokens, a tile of tokens at a
time, while the rows are in its cache. Few tokens meet rows one after the other, so that memory is
read from the first byte to the last, which is faster than several rows at once.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, njit

from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.linear.jobs import (
    BFLOAT_PAIRS,
    CHUNK_ROWS,
    MAX_TILE_TOKENS,
    TILE_ROWS,
    MultiplyJob,
)
from localkv.kernels.cpu.linear.pieces import find_chunk, read_matrix
from localkv.kernels.cpu.linear.rows import (
    SUM_BYTES,
    add_piece,
    multiply_rows,
    put_tile,
    row_dots,
    stack_memory,
)
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import reader, take_next

read_multiply_job = reader(MultiplyJob)

KIND = parameter("FORMAT", "f16")
"""Or BFLOAT_PAIRS."""
IS_PACKED = KIND == BFLOAT_PAIRS
ROW_BYTES, X_BYTES = row_dots(KIND).row_bytes, row_dots(KIND).x_bytes
"""Bytes of a value."""
PIECE = 4096 // X_BYTES
"""Columns of a tile that meet at a time: the tokens' stay in half of a first-level cache."""
SOME_TOKENS = min(4, MAX_TILE_TOKENS)
"""Tokens of a tile that has fewer than most."""
FEW_TOKENS, FEW_BYTES = 8, 36 << 10
"""Tokens that meet rows one after the other, at most, and bytes of more than two tokens, which stay
in the nearest cache meanwhile."""
TILE_BYTES = TILE_ROWS * MAX_TILE_TOKENS * SUM_BYTES
SUMS_BYTES = CHUNK_ROWS // TILE_ROWS * TILE_BYTES
"""Bytes of the sums of a chunk with a tile of tokens."""


@njit
def tile_width(n_tokens: int) -> int:
    """Tokens of the next tile, when `n_tokens` are left."""
    if n_tokens >= MAX_TILE_TOKENS:
        return MAX_TILE_TOKENS
    if n_tokens >= SOME_TOKENS:
        return SOME_TOKENS
    return 2 if n_tokens >= 2 else 1


@njit
def token_bytes(job: Any) -> int:
    return job.token_bytes if IS_PACKED else X_BYTES * job.n_in


@njit
def are_few(job: Any) -> bool:
    """Whether rows meet the tokens one after the other."""
    n = job.n_tokens
    return n <= 2 or (n <= FEW_TOKENS and n * token_bytes(job) <= FEW_BYTES)


@njit
def multiply_row(job: Any, matrix: Any, row: int, token: int, width: int) -> None:
    """A row times `width` tokens, as many as a tile has."""
    n_in, n_out, row_bytes = job.n_in, matrix.n_out, matrix.item_bytes
    x_bytes = token_bytes(job)
    x = job.activations + token * x_bytes
    plus, more_stride = matrix.addend, 0
    if plus != 0:
        more_stride = matrix.addend_stride
        plus += token * more_stride + 4 * row
    to = matrix.out + 4 * (token * n_out + row)
    w = matrix.data + row * row_bytes
    if width == SOME_TOKENS:
        multiply_rows(
            KIND, 1, SOME_TOKENS, w, row_bytes, x, x_bytes, n_in, to, n_out, plus, more_stride
        )
    elif width == 3:
        multiply_rows(KIND, 1, 3, w, row_bytes, x, x_bytes, n_in, to, n_out, plus, more_stride)
    elif width == 2:
        multiply_rows(KIND, 1, 2, w, row_bytes, x, x_bytes, n_in, to, n_out, plus, more_stride)
    else:
        multiply_rows(KIND, 1, 1, w, row_bytes, x, x_bytes, n_in, to, n_out, plus, more_stride)


@njit
def multiply_tiles(
    job: Any, matrix: Any, first: int, n_tiles: int, token: int, width: int, sums: Address
) -> None:
    """Some tiles of rows times one of tokens."""
    n_in, row_bytes, x_bytes = job.n_in, matrix.item_bytes, token_bytes(job)
    x = job.activations + token * x_bytes
    for start in range(0, n_in, PIECE):
        n, is_first = min(PIECE, n_in - start), int(start == 0)
        part, w = x + X_BYTES * start, matrix.data + first * row_bytes + ROW_BYTES * start
        for i in range(n_tiles):
            at = sums + i * TILE_BYTES
            if width == MAX_TILE_TOKENS:
                add_piece(
                    KIND, TILE_ROWS, MAX_TILE_TOKENS, w, row_bytes, part, x_bytes, n, at, is_first
                )
            elif width == SOME_TOKENS:
                add_piece(
                    KIND, TILE_ROWS, SOME_TOKENS, w, row_bytes, part, x_bytes, n, at, is_first
                )
            elif width == 2:
                add_piece(KIND, TILE_ROWS, 2, w, row_bytes, part, x_bytes, n, at, is_first)
            else:
                add_piece(KIND, TILE_ROWS, 1, w, row_bytes, part, x_bytes, n, at, is_first)
            w += TILE_ROWS * row_bytes
    put_tiles(matrix, first, n_tiles, token, width, sums)


@njit
def put_tiles(matrix: Any, first: int, n_tiles: int, token: int, width: int, sums: Address) -> None:
    """Their sums go to where they belong."""
    n_out, stride, more_stride = matrix.n_out, 4 * matrix.n_out, matrix.addend_stride
    for i in range(n_tiles):
        row, at = first + i * TILE_ROWS, sums + i * TILE_BYTES
        to, plus = matrix.out + 4 * (token * n_out + row), matrix.addend
        if plus != 0:
            plus += token * more_stride + 4 * row
        if width == MAX_TILE_TOKENS:
            put_tile(TILE_ROWS, MAX_TILE_TOKENS, at, to, stride, plus, more_stride)
        elif width == SOME_TOKENS:
            put_tile(TILE_ROWS, SOME_TOKENS, at, to, stride, plus, more_stride)
        elif width == 2:
            put_tile(TILE_ROWS, 2, at, to, stride, plus, more_stride)
        else:
            put_tile(TILE_ROWS, 1, at, to, stride, plus, more_stride)


@njit
def multiply_chunk(job: Any, matrix: Any, first: int, last: int, sums: Address) -> None:
    """Rows `first` to `last` times all tokens."""
    n_tiles = (last - first) // TILE_ROWS
    token = 0
    while token < job.n_tokens:
        width = tile_width(job.n_tokens - token)
        multiply_tiles(job, matrix, first, n_tiles, token, width, sums)
        for row in range(first + n_tiles * TILE_ROWS, last):
            for i in range(width):
                multiply_row(job, matrix, row, token + i, 1)
        token += width


@cfunc("void(int64, int64)")
def multiply(address: Address, thread: Count) -> None:
    """Multiply rows of some matrices with tokens, tile by tile (`MultiplyJob`)."""
    job = read_multiply_job(address)
    sums = stack_memory(SUMS_BYTES)
    while True:
        index, first, last = find_chunk(address, job, take_next(address))
        if index < 0:
            break
        matrix = read_matrix(address, index)
        if are_few(job):
            for row in range(first, last):
                for token in range(0, job.n_tokens, SOME_TOKENS):
                    multiply_row(job, matrix, row, token, min(SOME_TOKENS, job.n_tokens - token))
            continue
        multiply_chunk(job, matrix, first, last, sums)
