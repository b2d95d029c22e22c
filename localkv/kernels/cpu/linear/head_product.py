"""The worker of products of each head's panels with that head's rows, for each of their formats.

A thread packs activations of a head by itself: they are short, so nobody waits for others to pack.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, njit

from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.linear.jobs import (
    ACTIVATION_BLOCK_BYTES,
    IN_PLACE_FORMATS,
    MAX_TILE,
    TOKENS_AT_ONCE,
    HeadJob,
)
from localkv.kernels.cpu.linear.panels import (
    ROWS,
    TOTALS_BYTES,
    make_panel,
    multiply_rows,
    pack_planes,
    pack_row,
)
from localkv.kernels.cpu.linear.pieces import find_piece, tile_size, tile_start
from localkv.kernels.cpu.linear.rows import stack_memory
from localkv.kernels.cpu.linear.tiles import multiply_tile
from localkv.quant_formats.shared.cpu.panel_layout import LANES
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, put_f32, reader, take_next

read_head_job = reader(HeadJob)

KIND = parameter("FORMAT", "q4_0")
IN_PLACE = KIND in IN_PLACE_FORMATS


@njit
def multiply_alone(
    job: Any, rows: Address, first: Count, last: Count, x: Address, out: Address, packed: Address
) -> None:
    """Rows as in the file, of panels `first` to `last`, times the only token."""
    pack_planes(KIND, x, job.n_in, job.n_blocks, packed, 0, job.n_blocks)
    row_bytes, sums = job.item_bytes // LANES, stack_memory(TOTALS_BYTES)
    end = min(last * LANES, job.n_out)
    for i in range(first * LANES, end, ROWS):
        n = min(ROWS, end - i)
        multiply_rows(rows + i * row_bytes, row_bytes, n, packed, job.n_blocks, sums)
        for j in range(n):
            put_f32(out, i + j, get_f32(sums, j))


@njit
def multiply_panel(
    job: Any, panel: Address, n_rows: Count, n_tokens: Count, packed: Address, out: Address
) -> None:
    """A panel with packed tokens, tile by tile."""
    stride = job.out_token
    start = 0
    while start < n_tokens:
        size = tile_size(start, n_tokens)
        x = packed + start * job.n_blocks * ACTIVATION_BLOCK_BYTES
        to = out + start * stride
        if size == MAX_TILE:
            multiply_tile(KIND, MAX_TILE, panel, job.n_records, x, to, stride, n_rows, 0, 0)
        elif size == 4:
            multiply_tile(KIND, 4, panel, job.n_records, x, to, stride, n_rows, 0, 0)
        elif size == 3:
            multiply_tile(KIND, 3, panel, job.n_records, x, to, stride, n_rows, 0, 0)
        elif size == 2:
            multiply_tile(KIND, 2, panel, job.n_records, x, to, stride, n_rows, 0, 0)
        else:
            multiply_tile(KIND, 1, panel, job.n_records, x, to, stride, n_rows, 0, 0)
        start += size


@cfunc("void(int64, int64)")
def multiply_heads(address: Address, thread: Count) -> None:
    """Multiply panels of heads with their rows (`HeadJob`)."""
    job = read_head_job(address)
    made = job.scratch + thread * job.scratch_bytes
    packed = made + job.panel_bytes
    while True:
        head, first, last = find_piece(job, take_next(address))
        if head < 0:
            break
        matrix = job.data + head * job.matrix_bytes
        x, out = job.x + head * job.x_head, job.out + head * job.out_head
        if IN_PLACE and job.n_tokens == 1:
            multiply_alone(job, matrix, first, last, x, out, packed)
            continue
        for start in range(0, job.n_tokens, TOKENS_AT_ONCE):
            n_tokens = min(TOKENS_AT_ONCE, job.n_tokens - start)
            for token in range(n_tokens):
                tile = tile_start(token, n_tokens)
                to = packed + tile * job.n_blocks * ACTIVATION_BLOCK_BYTES
                size = tile_size(tile, n_tokens)
                row = x + (start + token) * job.x_token
                pack_row(KIND, row, job.n_in, job.n_blocks, to, size, token - tile)
            for i in range(first, last):
                n_rows = min(LANES, job.n_out - i * LANES)
                panel = matrix + i * job.item_bytes
                if IN_PLACE:
                    make_panel(panel, job.item_bytes // LANES, n_rows, made)
                    panel = made
                to = out + start * job.out_token + 4 * LANES * i
                multiply_panel(job, panel, n_rows, n_tokens, packed, to)
