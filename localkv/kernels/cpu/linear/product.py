"""The workers of products with panels of one format; `specialize` puts its name in.

Chunks of panels go to threads; a thread multiplies its chunk with all tokens, tile by tile, while
the panels are in its cache.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, njit

from localkv.formats.cpu.panel_layout import BLOCK, LANES
from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.linear.in_place import BLOCK_BYTES, make_panel, multiply_row
from localkv.kernels.cpu.linear.job import (
    ACTIVATION_BLOCK_BYTES,
    ACTIVATIONS,
    ADDEND,
    ADDEND_STRIDE,
    DATA,
    GROUP,
    IN_PLACE_FORMATS,
    ITEM_BYTES,
    MAX_TILE,
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
from localkv.kernels.cpu.linear.packing import pack_planes, pack_row
from localkv.kernels.cpu.linear.tiles import multiply_tile
from localkv.simd.memory import get_f32, get_i64, put_f32, take_next

KIND = parameter("FORMAT", "q4_0")
IN_PLACE = KIND in IN_PLACE_FORMATS


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
        if IN_PLACE and n_tokens == 1:
            pack_planes(KIND, x, n_in - first * BLOCK, n, get_i64(job, PACK_OUT), first, n_blocks)
        else:
            pack_row(KIND, x, n_in - first * BLOCK, n, to, size, token - start)


@njit
def multiply_panels(job: Any, matrix: Any, panels: Any, first: Any, last: Any) -> None:
    """Multiply panels `first` to `last` of a matrix, which start at `panels`, with all tokens."""
    n_tokens, n_records = get_i64(job, N_TOKENS), get_i64(job, N_RECORDS)
    token_bytes, activations = get_i64(job, TOKEN_BYTES), get_i64(job, ACTIVATIONS)
    panel_bytes, n_out = get_i64(job, PANEL_BYTES), get_i64(matrix, N_OUT)
    stride, more, more_stride = 4 * n_out, get_i64(matrix, ADDEND), 0
    if more != 0:
        more_stride = get_i64(matrix, ADDEND_STRIDE)
    start = 0
    while start < n_tokens:
        size = tile_size(start, n_tokens)
        x = activations + start * token_bytes
        for i in range(first, last):
            panel = panels + (i - first) * panel_bytes
            to = get_i64(matrix, OUT) + start * stride + 4 * LANES * i
            plus = 0
            if more != 0:
                plus = more + start * more_stride + 4 * LANES * i
            n = min(LANES, n_out - i * LANES)
            if size == MAX_TILE:
                multiply_tile(KIND, MAX_TILE, panel, n_records, x, to, stride, n, plus, more_stride)
            elif size == 4:
                multiply_tile(KIND, 4, panel, n_records, x, to, stride, n, plus, more_stride)
            elif size == 2:
                multiply_tile(KIND, 2, panel, n_records, x, to, stride, n, plus, more_stride)
            else:
                multiply_tile(KIND, 1, panel, n_records, x, to, stride, n, plus, more_stride)
        start += size


@njit
def multiply_rows(job: Any, matrix: Any, first: Any, last: Any) -> None:
    """Multiply the rows of such panels, as they are in the file, with the only token."""
    planes = get_i64(job, ACTIVATIONS)
    n_all = get_i64(job, TOKEN_BYTES) // ACTIVATION_BLOCK_BYTES
    row_bytes = get_i64(matrix, ITEM_BYTES) // LANES
    more, out = get_i64(matrix, ADDEND), get_i64(matrix, OUT)
    for i in range(first * LANES, min(last * LANES, get_i64(matrix, N_OUT))):
        row = get_i64(matrix, DATA) + i * row_bytes
        total = multiply_row(row, row_bytes // BLOCK_BYTES, planes, n_all)
        if more != 0:
            total += get_f32(more, i)
        put_f32(out, i, total)


@njit
def multiply_in_place(job: Any, thread: Any, matrix: Any, first: Any, last: Any) -> None:
    """The same with any number of tokens; panels are made a few at a time, in the thread's part."""
    if get_i64(job, N_TOKENS) == 1:
        multiply_rows(job, matrix, first, last)
        return
    group, panel_bytes = get_i64(job, GROUP), get_i64(job, PANEL_BYTES)
    n_out, item_bytes = get_i64(matrix, N_OUT), get_i64(matrix, ITEM_BYTES)
    panels = get_i64(job, PANELS) + thread * group * panel_bytes
    while first < last:
        end = min(first + group, last)
        for i in range(first, end):
            rows, n = get_i64(matrix, DATA) + i * item_bytes, min(LANES, n_out - i * LANES)
            make_panel(rows, item_bytes // LANES, n, panels + (i - first) * panel_bytes)
        multiply_panels(job, matrix, panels, first, end)
        first = end


@cfunc("void(int64, int64)")
def multiply(job: Any, thread: Any) -> None:
    """Multiply panels of some matrices with packed activations."""
    while True:
        matrix, first, last = find_chunk(job, take_next(job))
        if matrix == 0:
            break
        if IN_PLACE:
            multiply_in_place(job, thread, matrix, first, last)
        else:
            panels = get_i64(matrix, DATA) + first * get_i64(matrix, ITEM_BYTES)
            multiply_panels(job, matrix, panels, first, last)
