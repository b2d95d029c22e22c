"""The worker of products with rows as in the file, compiled for each of their formats.

Chunks of rows go to threads; a thread multiplies its chunk with all tokens, a tile of tokens at a
time, while the rows are in its cache. One token meets rows one after the other, so that memory is
read from the first byte to the last, which it does up to a fifth faster than several rows at once.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, njit

from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.linear.job import MAX_TILE_TOKENS, TILE_ROWS
from localkv.kernels.cpu.linear.read_job import find_chunk, read_matrix, read_multiply_job
from localkv.kernels.cpu.linear.rows import multiply_rows
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import take_next

KIND = parameter("FORMAT", "f16")
SOME_TOKENS = min(4, MAX_TILE_TOKENS)
"""Of a tile that has fewer than most."""


@njit
def tile_width(n_tokens: int) -> int:
    """Tokens of the next tile, when `n_tokens` are left."""
    if n_tokens >= MAX_TILE_TOKENS:
        return MAX_TILE_TOKENS
    if n_tokens >= SOME_TOKENS:
        return SOME_TOKENS
    return 2 if n_tokens >= 2 else 1


@njit
def multiply_tile(job: Any, matrix: Any, row: int, token: int, height: int, width: int) -> None:
    """Some rows times some tokens; what is no tile of one of these sizes is done one by one."""
    n_in, n_out = job.n_in, matrix.n_out
    row_bytes, stride = matrix.item_bytes, matrix.addend_stride
    w = matrix.data + row * row_bytes
    x = job.activations + 4 * token * n_in
    out = matrix.out + 4 * (token * n_out + row)
    plus = matrix.addend
    if plus != 0:
        plus += token * stride + 4 * row
    if height < TILE_ROWS:
        for i in range(height):
            for j in range(width):
                at = w + i * row_bytes, x + 4 * j * n_in, out + 4 * (j * n_out + i)
                addend = plus + j * stride + 4 * i if plus != 0 else 0
                multiply_rows(KIND, 1, 1, at[0], row_bytes, at[1], n_in, at[2], n_out, addend, 0)
    elif width == MAX_TILE_TOKENS:
        multiply_rows(
            KIND, TILE_ROWS, MAX_TILE_TOKENS, w, row_bytes, x, n_in, out, n_out, plus, stride
        )
    elif width == SOME_TOKENS:
        multiply_rows(KIND, TILE_ROWS, SOME_TOKENS, w, row_bytes, x, n_in, out, n_out, plus, stride)
    elif width == 2:
        multiply_rows(KIND, TILE_ROWS, 2, w, row_bytes, x, n_in, out, n_out, plus, stride)
    else:
        multiply_rows(KIND, TILE_ROWS, 1, w, row_bytes, x, n_in, out, n_out, plus, stride)


@cfunc("void(int64, int64)")
def multiply(address: Address, thread: Count) -> None:
    """Multiply rows of some matrices with float32 activations, tile by tile (`MultiplyJob`)."""
    job = read_multiply_job(address)
    while True:
        index, first, last = find_chunk(address, job, take_next(address))
        if index < 0:
            break
        matrix = read_matrix(address, index)
        height = 1 if job.n_tokens == 1 else TILE_ROWS
        token = 0
        while token < job.n_tokens:
            width = tile_width(job.n_tokens - token)
            for row in range(first, last, height):
                multiply_tile(job, matrix, row, token, min(height, last - row), width)
            token += width
