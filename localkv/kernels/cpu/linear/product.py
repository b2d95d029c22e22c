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
    PAIR_FORMATS,
    SUM_BYTES,
    clear_sums,
    multiply_pair,
    multiply_record,
    multiply_tile,
    put_unpacked_sums,
    record_memory,
    sums_memory,
    unpack_record,
    unpacks,
)
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK, LANES
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, put_f32, reader, take_next

read_multiply_job = reader(MultiplyJob)
read_pack_job = reader(PackJob)

KIND = parameter("FORMAT", "q4_0")
IN_PLACE = KIND in IN_PLACE_FORMATS
PAIRS = KIND in PAIR_FORMATS
UNPACKS = unpacks(KIND)


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
def multiply_records(
    job: Any, panel: Address, first: Count, n_tokens: Count, sums: Address
) -> None:
    """Sums of a panel times some tokens; the last ones of the batch end with smaller tiles."""
    record_bytes = job.panel_bytes // job.n_records
    token_bytes = job.token_bytes // job.n_records
    unpacked = record_memory(KIND)
    for record in range(job.n_records):
        unpack_record(KIND, panel + record * record_bytes, unpacked)
        start = 0
        while start < n_tokens:
            size = tile_size(start, n_tokens)
            x = job.activations + (first + start) * job.token_bytes + record * size * token_bytes
            to = sums + SUM_BYTES * start
            if size == MAX_TILE:
                multiply_record(KIND, MAX_TILE, unpacked, x, to)
            elif size == 4:
                multiply_record(KIND, 4, unpacked, x, to)
            elif size == 2:
                multiply_record(KIND, 2, unpacked, x, to)
            else:
                multiply_record(KIND, 1, unpacked, x, to)
            start += size


@njit
def multiply_unpacked(job: Any, matrix: Any, panels: Address, first: Count, last: Count) -> None:
    """What `multiply_panels` does, for many tokens and formats whose codes take long to read."""
    stride, more_stride = 4 * matrix.n_out, matrix.addend_stride
    sums = sums_memory()
    for start in range(0, job.n_tokens, GROUP_TOKENS):
        n_tokens = min(job.n_tokens - start, GROUP_TOKENS)
        for i in range(first, last):
            clear_sums(sums, n_tokens)
            panel = panels + (i - first) * job.panel_bytes
            multiply_records(job, panel, start, n_tokens, sums)
            to = matrix.out + start * stride + 4 * LANES * i
            plus = 0
            if matrix.addend != 0:
                plus = matrix.addend + start * more_stride + 4 * LANES * i
            n = min(LANES, matrix.n_out - i * LANES)
            put_unpacked_sums(sums, n_tokens, to, stride, n, plus, more_stride)


@njit
def multiply_pairs(
    job: Any, matrix: Any, panels: Address, first: Count, last: Count, start: Count
) -> int:
    """Two panels at a time, with the tile of tokens from `start` on; the first that is left."""
    stride, more_stride = 4 * matrix.n_out, matrix.addend_stride
    x = job.activations + start * job.token_bytes
    i = first
    while i + 1 < last:
        panel = panels + (i - first) * job.panel_bytes
        to = matrix.out + start * stride + 4 * LANES * i
        plus = 0
        if matrix.addend != 0:
            plus = matrix.addend + start * more_stride + 4 * LANES * i
        n = min(2 * LANES, matrix.n_out - i * LANES)
        size, n_records = job.panel_bytes, job.n_records
        multiply_pair(KIND, MAX_TILE, panel, size, n_records, x, to, stride, n, plus, more_stride)
        i += 2
    return i


@njit
def multiply_panels(job: Any, matrix: Any, panels: Address, first: Count, last: Count) -> None:
    """Multiply panels `first` to `last` of a matrix, which start at `panels`, with all tokens."""
    if UNPACKS and job.n_tokens >= MAX_TILE:
        multiply_unpacked(job, matrix, panels, first, last)
        return
    n_tokens, n_records, stride = job.n_tokens, job.n_records, 4 * matrix.n_out
    more, more_stride = matrix.addend, 0
    if more != 0:
        more_stride = matrix.addend_stride
    start = 0
    while start < n_tokens:
        size = tile_size(start, n_tokens)
        x, alone = job.activations + start * job.token_bytes, first
        if PAIRS and not UNPACKS and size == MAX_TILE:
            alone = multiply_pairs(job, matrix, panels, first, last, start)
        for i in range(alone, last):
            panel = panels + (i - first) * job.panel_bytes
            to = matrix.out + start * stride + 4 * LANES * i
            plus = 0
            if more != 0:
                plus = more + start * more_stride + 4 * LANES * i
            n = min(LANES, matrix.n_out - i * LANES)
            if size == MAX_TILE:
                if not UNPACKS:
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
