"""The workers of products with panels of one format; `specialize` puts its name in.

Chunks of panels go to threads; a thread multiplies its chunk with all tokens, tile by tile, while
the panels are in its cache.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, njit

from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.linear.jobs import (
    ACTIVATION_BLOCK_BYTES,
    IN_PLACE_FORMATS,
    MAX_TILE,
    PART_BLOCKS,
    MultiplyJob,
    PackJob,
)
from localkv.kernels.cpu.linear.panels import (
    ROWS,
    TOTALS_BYTES,
    make_panel,
    multiply_rows,
    pack_planes,
    pack_row,
)
from localkv.kernels.cpu.linear.pieces import find_chunk, read_matrix, tile_size, tile_start
from localkv.kernels.cpu.linear.rows import stack_memory
from localkv.kernels.cpu.linear.tiles import (
    GROUP_TOKENS,
    PREFETCH_BYTES,
    SUM_BYTES,
    UNPACKED_BLOCKS,
    UNPACKED_PANELS,
    clear_sums,
    multiply_blocks,
    multiply_tile,
    put_unpacked_sums,
    sums_memory,
    unpack_record,
    unpacked_bytes,
    unpacked_memory,
    unpacked_panel_bytes,
    unpacks,
)
from localkv.quant_formats.shared.cpu.panel_codes import panel_format
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK, LANES
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, put_f32, reader, take_next

read_multiply_job = reader(MultiplyJob)
read_pack_job = reader(PackJob)

KIND = parameter("FORMAT", "q4_0")
IN_PLACE = KIND in IN_PLACE_FORMATS
UNPACKS = unpacks(KIND)
LEAST_UNPACKED = MAX_TILE if UNPACKS and panel_format(KIND).is_costly else 4 * MAX_TILE
"""Tokens from which on panels are unpacked."""
RECORD_BLOCKS = panel_format(KIND).record_blocks
UNPACKED_RECORDS = UNPACKED_BLOCKS // RECORD_BLOCKS
RECORD_STEP = RECORD_BLOCKS * unpacked_bytes(panel_format(KIND))
PANEL_STEP = unpacked_panel_bytes(panel_format(KIND))
SUMS_STEP = GROUP_TOKENS * SUM_BYTES
"""Bytes from an unpacked record, panel or a panel's sums to the next one's."""


@cfunc("void(int64, int64)")
def pack(address: Address, thread: Count) -> None:
    """Pack float32 activations (`PackJob`)."""
    job = read_pack_job(address)
    n_blocks, n_parts = job.n_blocks, job.n_parts
    while True:
        piece = take_next(address)
        if piece >= job.n_tokens * n_parts:
            break
        token, part = piece // n_parts, piece % n_parts
        first = part * PART_BLOCKS
        n = n_blocks - first if part == n_parts - 1 else PART_BLOCKS
        n_in = job.n_in - first * BLOCK
        x = job.x + 4 * (token * job.n_in + first * BLOCK)
        if IN_PLACE and job.n_tokens == 1:
            pack_planes(KIND, x, n_in, n, job.packed, first, n_blocks)
        else:
            start = tile_start(token, job.n_tokens)
            size = tile_size(start, job.n_tokens)
            to = job.packed + (start * n_blocks + first * size) * ACTIVATION_BLOCK_BYTES
            pack_row(KIND, x, n_in, n, to, size, token - start)


@njit
def multiply_single(
    size: Count, n_blocks: Count, unpacked: Address, x: Address, sums: Address
) -> None:
    """Unpacked blocks of a panel times a tile of any size."""
    if size == MAX_TILE:
        multiply_blocks(KIND, 1, MAX_TILE, n_blocks, unpacked, x, sums)
    elif size == 4:
        multiply_blocks(KIND, 1, 4, n_blocks, unpacked, x, sums)
    elif size == 3:
        multiply_blocks(KIND, 1, 3, n_blocks, unpacked, x, sums)
    elif size == 2:
        multiply_blocks(KIND, 1, 2, n_blocks, unpacked, x, sums)
    else:
        multiply_blocks(KIND, 1, 1, n_blocks, unpacked, x, sums)


@njit
def multiply_records(
    job: Any, panels: Address, n_panels: Count, first: Count, n_tokens: Count, sums: Address
) -> None:
    """Sums of panels times some tokens; the last ones of the batch end with smaller tiles."""
    record_bytes = job.panel_bytes // job.n_records
    token_bytes = job.token_bytes // job.n_records
    unpacked = unpacked_memory(KIND)
    for record in range(0, job.n_records, UNPACKED_RECORDS):
        n_records = min(UNPACKED_RECORDS, job.n_records - record)
        # after the end of a panel are the others, which are read at the same time
        ahead = PREFETCH_BYTES
        if record * record_bytes + ahead >= job.panel_bytes:
            ahead += (n_panels - 1) * job.panel_bytes
        for i in range(n_panels):
            at, to = panels + i * job.panel_bytes + record * record_bytes, unpacked + i * PANEL_STEP
            for _ in range(n_records):
                unpack_record(KIND, at, at + ahead, to)
                at, to = at + record_bytes, to + RECORD_STEP
        n_blocks = n_records * RECORD_BLOCKS
        start = 0
        while start < n_tokens:
            size = tile_size(start, n_tokens)
            x = job.activations + (first + start) * job.token_bytes + record * size * token_bytes
            to = sums + SUM_BYTES * start
            if size == MAX_TILE and n_panels == UNPACKED_PANELS:
                multiply_blocks(KIND, UNPACKED_PANELS, MAX_TILE, n_blocks, unpacked, x, to)
            else:
                for i in range(n_panels):
                    multiply_single(
                        size, n_blocks, unpacked + i * PANEL_STEP, x, to + i * SUMS_STEP
                    )
            start += size


@njit
def multiply_unpacked(job: Any, matrix: Any, panels: Address, first: Count, last: Count) -> None:
    """What `multiply_panels` does, for many tokens."""
    stride, more_stride = 4 * matrix.n_out, matrix.addend_stride
    sums = sums_memory()
    for start in range(0, job.n_tokens, GROUP_TOKENS):
        n_tokens = min(job.n_tokens - start, GROUP_TOKENS)
        for i in range(first, last, UNPACKED_PANELS):
            n_panels = min(UNPACKED_PANELS, last - i)
            for k in range(n_panels):
                clear_sums(sums + k * SUMS_STEP, n_tokens)
            panel = panels + (i - first) * job.panel_bytes
            multiply_records(job, panel, n_panels, start, n_tokens, sums)
            for k in range(i, i + n_panels):
                to = matrix.out + start * stride + 4 * LANES * k
                plus = 0
                if matrix.addend != 0:
                    plus = matrix.addend + start * more_stride + 4 * LANES * k
                n = min(LANES, matrix.n_out - k * LANES)
                put_unpacked_sums(
                    sums + (k - i) * SUMS_STEP, n_tokens, to, stride, n, plus, more_stride
                )


@njit
def multiply_panels(job: Any, matrix: Any, panels: Address, first: Count, last: Count) -> None:
    """Multiply panels `first` to `last` of a matrix, which start at `panels`, with all tokens."""
    if UNPACKS and job.n_tokens >= LEAST_UNPACKED:
        multiply_unpacked(job, matrix, panels, first, last)
        return
    n_tokens, n_records, stride = job.n_tokens, job.n_records, 4 * matrix.n_out
    more, more_stride = matrix.addend, 0
    if more != 0:
        more_stride = matrix.addend_stride
    start = 0
    while start < n_tokens:
        size = tile_size(start, n_tokens)
        x = job.activations + start * job.token_bytes
        for i in range(first, last):
            panel = panels + (i - first) * job.panel_bytes
            to = matrix.out + start * stride + 4 * LANES * i
            plus = 0
            if more != 0:
                plus = more + start * more_stride + 4 * LANES * i
            n = min(LANES, matrix.n_out - i * LANES)
            if size == MAX_TILE:
                if LEAST_UNPACKED > MAX_TILE:
                    multiply_tile(
                        KIND, MAX_TILE, panel, n_records, x, to, stride, n, plus, more_stride
                    )
            elif size == 4:
                multiply_tile(KIND, 4, panel, n_records, x, to, stride, n, plus, more_stride)
            elif size == 3:
                multiply_tile(KIND, 3, panel, n_records, x, to, stride, n, plus, more_stride)
            elif size == 2:
                multiply_tile(KIND, 2, panel, n_records, x, to, stride, n, plus, more_stride)
            else:
                multiply_tile(KIND, 1, panel, n_records, x, to, stride, n, plus, more_stride)
        start += size


@njit
def multiply_alone(job: Any, matrix: Any, first: Count, last: Count) -> None:
    """Multiply the rows of such panels, as they are in the file, with the only token."""
    planes, n_all = job.activations, job.token_bytes // ACTIVATION_BLOCK_BYTES
    row_bytes, sums = matrix.item_bytes // LANES, stack_memory(TOTALS_BYTES)
    end = min(last * LANES, matrix.n_out)
    for i in range(first * LANES, end, ROWS):
        n = min(ROWS, end - i)
        multiply_rows(matrix.data + i * row_bytes, row_bytes, n, planes, n_all, sums)
        for j in range(n):
            total = get_f32(sums, j)
            if matrix.addend != 0:
                total += get_f32(matrix.addend, i + j)
            put_f32(matrix.out, i + j, total)


@njit
def multiply_in_place(job: Any, thread: Count, matrix: Any, first: Count, last: Count) -> None:
    """Multiply any number of tokens; panels are made a few at a time, in the thread's part."""
    if job.n_tokens == 1:
        multiply_alone(job, matrix, first, last)
        return
    panels = job.panels + thread * job.group * job.panel_bytes
    while first < last:
        end = min(first + job.group, last)
        for i in range(first, end):
            rows, n = matrix.data + i * matrix.item_bytes, min(LANES, matrix.n_out - i * LANES)
            make_panel(rows, matrix.item_bytes // LANES, n, panels + (i - first) * job.panel_bytes)
        multiply_panels(job, matrix, panels, first, end)
        first = end


@cfunc("void(int64, int64)")
def multiply(address: Address, thread: Count) -> None:
    """Multiply panels of some matrices with packed activations (`MultiplyJob`)."""
    job = read_multiply_job(address)
    while True:
        index, first, last = find_chunk(address, job, take_next(address))
        if index < 0:
            break
        matrix = read_matrix(address, index)
        if IN_PLACE:
            multiply_in_place(job, thread, matrix, first, last)
        else:
            multiply_panels(job, matrix, matrix.data + first * matrix.item_bytes, first, last)
