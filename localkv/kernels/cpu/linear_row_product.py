"""The worker of products with rows as in the file; `specialize` puts a format's name in."""

from __future__ import annotations

from typing import Any

from numba import cfunc

from localkv.kernels.cpu.linear_job import (
    ACTIVATIONS,
    ADDEND,
    ADDEND_STRIDE,
    DATA,
    ITEM_BYTES,
    N_IN,
    N_OUT,
    N_TOKENS,
    OUT,
    TILE_ROWS,
    TILE_TOKENS,
    find_chunk,
)
from localkv.kernels.cpu.linear_rows import multiply_rows
from localkv.simd.memory import get_i64, take_next

KIND = "f16"


@cfunc("void(int64, int64)")
def multiply(job: Any, thread: Any) -> None:
    """Multiply rows of some matrices with float32 activations, tile by tile."""
    n_tokens, n_in = get_i64(job, N_TOKENS), get_i64(job, N_IN)
    while True:
        matrix, first, last = find_chunk(job, take_next(job))
        if matrix == 0:
            break
        n_out, row_bytes = get_i64(matrix, N_OUT), get_i64(matrix, ITEM_BYTES)
        more, more_stride = get_i64(matrix, ADDEND), get_i64(matrix, ADDEND_STRIDE)
        row = first
        while row < last:
            height = TILE_ROWS if row + TILE_ROWS <= last else 1
            rows = get_i64(matrix, DATA) + row * row_bytes
            token = 0
            while token < n_tokens:
                width = TILE_TOKENS if token + TILE_TOKENS <= n_tokens else 1
                x = get_i64(job, ACTIVATIONS) + 4 * token * n_in
                out = get_i64(matrix, OUT) + 4 * (token * n_out + row)
                plus = 0
                if more != 0:
                    plus = more + token * more_stride + 4 * row
                if height == 1:
                    width = 1
                    multiply_rows(
                        KIND, 1, 1, rows, row_bytes, x, n_in, out, n_out, plus, more_stride
                    )
                elif width == 1:
                    multiply_rows(
                        KIND, TILE_ROWS, 1, rows, row_bytes, x, n_in, out, n_out, plus, more_stride
                    )
                else:
                    multiply_rows(
                        KIND,
                        TILE_ROWS,
                        TILE_TOKENS,
                        rows,
                        row_bytes,
                        x,
                        n_in,
                        out,
                        n_out,
                        plus,
                        more_stride,
                    )
                token += width
            row += height
