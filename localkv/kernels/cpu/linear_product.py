"""The workers of products with panels of one format; `specialize` puts its name in.

Chunks of panels go to threads; a thread multiplies its chunk with all tokens, tile by tile, while
the panels are in its cache.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, njit

from localkv.kernels.cpu.linear_in_place import RECORD_BYTES, lay_out_panel
from localkv.kernels.cpu.linear_in_place_product import multiply_rows_in_place
from localkv.kernels.cpu.linear_job import (
    ACTIVATION_BLOCK_BYTES,
    ACTIVATIONS,
    ADDEND,
    ADDEND_STRIDE,
    BLOCK,
    DATA,
    GROUP,
    ITEM_BYTES,
    MAX_TILE,
    N_ITEMS,
    N_OUT,
    N_RECORDS,
    N_TOKENS,
    OUT,
    PACK_BLOCKS,
    PACK_N_IN,
    PACK_OUT,
    PACK_PARTS,
    PACK_TOKENS,
    PACK_X,
    PANEL_BYTES,
    PANELS,
    PART_BLOCKS,
    TOKEN_BYTES,
    find_chunk,
    tile_size,
    tile_start,
)
from localkv.kernels.cpu.linear_packing import pack_row
from localkv.kernels.cpu.linear_tiles import multiply_tile
from localkv.kernels.cpu.panel_bytes import IN_PLACE_FORMAT_NAMES, LANES
from localkv.simd.cpu_features import HAS_VNNI
from localkv.simd.memory import get_i64, take_next

KIND = "q4_0"
IN_PLACE = KIND in IN_PLACE_FORMAT_NAMES
ONE_BY_ONE = IN_PLACE and HAS_VNNI


@cfunc("void(int64, int64)")
def pack(job: Any, thread: Any) -> None:
    """Pack float32 activations."""
    n_tokens, n_in = get_i64(job, PACK_TOKENS), get_i64(job, PACK_N_IN)
    n_blocks, n_parts = get_i64(job, PACK_BLOCKS), get_i64(job, PACK_PARTS)
    while True:
        piece = take_next(job)
        if piece >= n_tokens * n_parts:
            break
        token, part = piece // n_parts, piece % n_parts
        start = tile_start(token, n_tokens)
        size = tile_size(start, n_tokens)
        first = part * PART_BLOCKS
        n = n_blocks - first if part == n_parts - 1 else PART_BLOCKS
        x = get_i64(job, PACK_X) + 4 * (token * n_in + first * BLOCK)
        to = get_i64(job, PACK_OUT) + (start * n_blocks + first * size) * ACTIVATION_BLOCK_BYTES
        pack_row(KIND, x, n_in - first * BLOCK, n, to, size, token - start)


@njit
def lay_out(matrix: Any, first: Any, last: Any, panels: Any, panel_bytes: Any) -> None:
    """Make panels of a matrix whose rows are as in the file."""
    item_bytes, n_items = get_i64(matrix, ITEM_BYTES), get_i64(matrix, N_ITEMS)
    for i in range(first, last):
        rows = get_i64(matrix, DATA) + i * item_bytes
        n = min(LANES, get_i64(matrix, N_OUT) - i * LANES)
        ahead = rows + item_bytes if i + 1 < n_items else rows
        lay_out_panel(rows, item_bytes // LANES, n, ahead, panels + (i - first) * panel_bytes)


@njit
def multiply_one(matrix: Any, number: Any, x: Any) -> bool:
    """Multiply 16 rows as in the file with one token, if they are whole panels and records."""
    item_bytes, n_out = get_i64(matrix, ITEM_BYTES), get_i64(matrix, N_OUT)
    row_bytes = item_bytes // LANES
    if (number + 1) * LANES > n_out or row_bytes % RECORD_BYTES != 0:
        return False
    rows = get_i64(matrix, DATA) + number * item_bytes
    ahead = rows + item_bytes if (number + 2) * LANES <= n_out else rows
    plus = get_i64(matrix, ADDEND)
    if plus != 0:
        plus += 4 * LANES * number
    to = get_i64(matrix, OUT) + 4 * LANES * number
    multiply_rows_in_place(rows, row_bytes, ahead, x, to, plus)
    return True


@cfunc("void(int64, int64)")
def multiply(job: Any, thread: Any) -> None:
    """Multiply panels of some matrices with packed activations."""
    n_tokens, n_records = get_i64(job, N_TOKENS), get_i64(job, N_RECORDS)
    token_bytes, activations = get_i64(job, TOKEN_BYTES), get_i64(job, ACTIVATIONS)
    panel_bytes, group = get_i64(job, PANEL_BYTES), get_i64(job, GROUP)
    made = get_i64(job, PANELS) + thread * group * panel_bytes
    matrix, first, last, end = 0, 0, 0, 0
    while True:
        if last == end:
            matrix, last, end = find_chunk(job, take_next(job))
            if matrix == 0:
                break
        first, last = last, min(last + group, end)
        panels = get_i64(matrix, DATA)
        if ONE_BY_ONE and n_tokens == 1 and multiply_one(matrix, first, activations):
            continue
        if IN_PLACE:
            lay_out(matrix, first, last, made, panel_bytes)
            panels = made - first * panel_bytes
        n_out = get_i64(matrix, N_OUT)
        stride, more, more_stride = 4 * n_out, get_i64(matrix, ADDEND), 0
        if more != 0:
            more_stride = get_i64(matrix, ADDEND_STRIDE)
        start = 0
        while start < n_tokens:
            size = tile_size(start, n_tokens)
            x = activations + start * token_bytes
            for i in range(first, last):
                panel = panels + i * panel_bytes
                to = get_i64(matrix, OUT) + start * stride + 4 * LANES * i
                plus = 0
                if more != 0:
                    plus = more + start * more_stride + 4 * LANES * i
                n = min(LANES, n_out - i * LANES)
                if size == MAX_TILE:
                    multiply_tile(
                        KIND, MAX_TILE, panel, n_records, x, to, stride, n, plus, more_stride
                    )
                elif size == 4:
                    multiply_tile(KIND, 4, panel, n_records, x, to, stride, n, plus, more_stride)
                elif size == 2:
                    multiply_tile(KIND, 2, panel, n_records, x, to, stride, n, plus, more_stride)
                else:
                    multiply_tile(KIND, 1, panel, n_records, x, to, stride, n, plus, more_stride)
            start += size
