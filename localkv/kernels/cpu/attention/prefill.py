"""Prefill attention: blocks of query rows over tiles of K and V that are decoded to float32.

A worker (see `thread_pool`) takes a block of rows (new token, query head) of one sequence, for one
KV head, at a time: at most `BLOCK_ROWS`. It decodes `TILE` tokens of K and V at a time
into its cache and folds them in by online softmax. The decoders are functions of K's and V's type,
called by address; this file is compiled once for all.
"""

from __future__ import annotations

from numba import cfunc, njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.jobs import TILE_ROWS, TILE_VECTORS, Job
from localkv.kernels.cpu.attention.queries import (
    add_distances,
    end_visible,
    first_visible,
    gather_queries,
    put_output,
    read_block,
    regions,
    row_index,
    softcap_of,
)
from localkv.kernels.cpu.attention.sizes import TILE, block_scratch
from localkv.kernels.cpu.attention.softmax import ZERO, cap_logits, clear_row, row_sum, soften
from localkv.simd import LANES
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import call_address, get_f32, get_i64, reader, take_next
from localkv.simd.vector import fma_grid, load_grid, load_tuple, store_grid, store_tuple, zeros_f32

read_job = reader(Job)

block_scratch = njit(block_scratch)
STEP = TILE_VECTORS * LANES
SUMS = TILE_VECTORS * TILE_ROWS


@njit
def multiply_q_k(
    logits: Address, q: Address, k: Address, first: int, end: int, head_dim: int
) -> None:
    """logits [TILE_ROWS, TILE] = q [TILE_ROWS, head_dim] k [head_dim, TILE].

    At least columns `first` to `end` - 1 are written.
    """
    for t in range(first // STEP * STEP, end, STEP):
        sums = zeros_f32(SUMS)
        for c in range(head_dim):
            keys = load_tuple(k, c * TILE + t, LANES, TILE_VECTORS)
            sums = fma_grid(sums, keys, q, c, 0, head_dim)
        store_grid(logits, t, LANES, TILE, TILE_VECTORS, sums)


@njit
def add_p_v(out: Address, p: Address, v: Address, first: int, end: int, head_dim: int) -> None:
    """out [TILE_ROWS, head_dim] += p [TILE_ROWS, TILE] v [TILE, head_dim], of tokens `first` to
    `end` - 1."""
    whole = head_dim // STEP * STEP
    for c in range(0, whole, STEP):
        sums = load_grid(out, c, LANES, head_dim, TILE_VECTORS, TILE_ROWS)
        for t in range(first, end):
            values = load_tuple(v, t * head_dim + c, LANES, TILE_VECTORS)
            sums = fma_grid(sums, values, p, t, 0, TILE)
        store_grid(out, c, LANES, head_dim, TILE_VECTORS, sums)
    for c in range(whole, head_dim, LANES):
        last = load_tuple(out, c, head_dim, TILE_ROWS)
        for t in range(first, end):
            last = fma_grid(last, load_tuple(v, t * head_dim + c, LANES, 1), p, t, 0, TILE)
        store_tuple(out, c, head_dim, last)


@njit
def attend_block(address: Address, job: Job, piece: int, head: int, scratch: Address) -> None:
    """One block of rows and one KV head."""
    block = read_block(job.pieces, piece)
    head_dim, group, token = job.head_dim, job.group, block.token
    first_row, n_rows = block.row, block.n_rows
    n_padded = (n_rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    k_blocks, v_blocks = head_dim // job.k_block, head_dim // job.v_block
    softcap = softcap_of(address)

    at = block_scratch(TILE_ROWS, head_dim)
    q, out = scratch + at.q * 4, scratch + at.out * 4
    k, v, scales = scratch + at.k * 4, scratch + at.v * 4, scratch + at.scales * 4
    logits, totals = scratch + at.logits * 4, scratch + at.totals * 4
    references = scratch + at.references * 4

    gather_queries(address, job, q, token, head, first_row, n_rows, n_padded)
    for row in range(n_padded):
        clear_row(out + row * head_dim * 4, head_dim, references + row * 4, totals + row * 64)

    # what a token sees begins and ends no earlier than what the one before sees
    begin = first_visible(job, token + first_row // group) // TILE * TILE
    for t0 in range(begin, end_visible(job, token + (first_row + n_rows - 1) // group), TILE):
        place = (get_i64(block.table, t0 // PAGE_TOKENS), head)
        where = (k_blocks, t0 % PAGE_TOKENS // LANES)
        call_address(job.k_kernel, (k, scales, *regions(job.k_planes, place, 0), *where))
        where = (v_blocks, t0 % PAGE_TOKENS // LANES)
        call_address(job.v_kernel, (v, scales, *regions(job.v_planes, place, 0), *where))
        for tile_row in range(0, n_padded, TILE_ROWS):
            end_row = min(tile_row + TILE_ROWS, n_rows)
            first = max(0, first_visible(job, token + (first_row + tile_row) // group) - t0)
            end = min(TILE, end_visible(job, token + (first_row + end_row - 1) // group) - t0)
            if first >= end:
                continue
            rows_out = out + tile_row * head_dim * 4
            multiply_q_k(logits, q + tile_row * head_dim * 4, k, first, end, head_dim)
            if softcap > ZERO:
                cap_logits(logits, TILE_ROWS * TILE, softcap)
            for row in range(tile_row, end_row):
                row_token = token + (first_row + row) // group
                if job.slopes:
                    of = token * group + first_row + row
                    at_row = logits + (row - tile_row) * TILE * 4
                    add_distances(job, at_row, TILE, head, of, t0)
                soften(
                    logits + (row - tile_row) * TILE * 4,
                    TILE,
                    first_visible(job, row_token) - t0,
                    end_visible(job, row_token) - t0,
                    out + row * head_dim * 4,
                    head_dim,
                    references + row * 4,
                    totals + row * 64,
                )
            add_p_v(rows_out, logits, v, first, end, head_dim)

    for row in range(n_rows):
        index = row_index(job, token, head, first_row + row)
        total = row_sum(totals + row * 64)
        put_output(job, index, out + row * head_dim * 4, get_f32(references, row), total)


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    job = read_job(address)
    scratch = job.scratch + thread * job.scratch_floats * 4
    while True:
        piece = take_next(address)
        if piece >= job.n_pieces:
            break
        attend_block(address, job, piece // job.n_kv_heads, piece % job.n_kv_heads, scratch)
