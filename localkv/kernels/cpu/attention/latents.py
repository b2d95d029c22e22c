"""Attention over latents: blocks of query rows over tiles of packed rows, decoded once for all.

A worker (see `thread_pool`) takes one part of what a block of rows (new token, query head) sees at
a time. It decodes `TILE` rows of the cache into its memory, turned so that tokens lie in lanes for
the products with queries. It decodes them once more so that channels lie in lanes for the weighted
sums, as values are the same latents. Parts of a generated token are merged by whoever finishes the
last one; a token of a prompt has one. The decoders are functions of the types, called by address.
"""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.jobs import (
    LATENT_SOFTCAP,
    LATENT_SOFTMAX_SCALE,
    TILE_VECTORS,
    LatentBlock,
    LatentJob,
    LatentPiece,
    latent_scratch,
    part_floats,
)
from localkv.kernels.cpu.attention.queries import regions
from localkv.kernels.cpu.attention.sizes import TILE
from localkv.kernels.cpu.attention.softmax import (
    ONE,
    START,
    ZERO,
    cap_logits,
    clear_row,
    fade,
    log_sum_exp,
    query_factor,
    row_sum,
    soften,
)
from localkv.kernels.cpu.jit.parameters import parameter
from localkv.simd import LANES
from localkv.simd.arithmetic import add, f32x16, mul, zero_f32
from localkv.simd.kinds import Address, Count, Float
from localkv.simd.memory import (
    call_address,
    get_f32,
    get_i64,
    load_f32,
    put_f32,
    reader,
    store_f32,
    take_next,
)
from localkv.simd.shuffle import transpose_words
from localkv.simd.vector import fma_grid, load_grid, load_tuple, store_grid, zeros_f32

TILE_ROWS = parameter("TILE_ROWS", 8)
"""Rows whose products are in registers at once."""
STEP = TILE_VECTORS * LANES
SUMS = TILE_VECTORS * TILE_ROWS
WORDS = 4
"""Words of a row that are transposed at a time."""
latent_scratch, part_floats = njit(latent_scratch), njit(part_floats)
read_job, read_block, read_piece = reader(LatentJob), reader(LatentBlock), reader(LatentPiece)


@njit
def gather_queries(address: Address, job: LatentJob, block: LatentBlock, q: Address) -> None:
    """q [n_rows, latent_dim + rope_dim]: scaled rows of the block, zeros after them."""
    scale, softcap = (
        get_f32(address, LATENT_SOFTMAX_SCALE * 2),
        get_f32(address, LATENT_SOFTCAP * 2),
    )
    factor = f32x16(query_factor(scale, softcap))
    width = job.latent_dim + job.rope_dim
    first = block.token * job.n_heads + block.head
    for row in range(job.n_rows):
        for c in range(0, width, LANES):
            x = zero_f32()
            if row < block.n_rows:
                if c < job.latent_dim:
                    x = load_f32(job.q, (first + row) * job.latent_dim + c)
                else:
                    x = load_f32(job.q_rotated, (first + row) * job.rope_dim + c - job.latent_dim)
                x = mul(x, factor)
            store_f32(q, row * width + c, x)


@njit
def turn_latents(k: Address, v: Address, latent_dim: int) -> None:
    """v [latent_dim / LANES, TILE, LANES] of k [latent_dim, TILE]."""
    for c in range(0, latent_dim, LANES):
        for t in range(0, TILE, WORDS):
            rows = k + (c * TILE + t) * 4
            transpose_words(rows, TILE * 4, v + (c * TILE + t * LANES) * 4, np.int32(0))


@njit
def turn_rotated(rows: Address, k: Address, rope_dim: int, spare: Address) -> None:
    """k [rope_dim, TILE] of rows [TILE, rope_dim]; `spare` has room for 64 floats."""
    for t in range(0, TILE, LANES):
        for c in range(0, rope_dim, WORDS):
            transpose_words(rows + (t * rope_dim + c) * 4, rope_dim * 4, spare, np.int32(0))
            for i in range(WORDS):
                store_f32(k, (c + i) * TILE + t, load_f32(spare, i * LANES))


@njit
def multiply_q_k(logits: Address, q: Address, k: Address, first: int, end: int, width: int) -> None:
    """logits [TILE_ROWS, TILE] = q [TILE_ROWS, width] k [width, TILE].

    At least columns `first` to `end` - 1 are written.
    """
    for t in range(first // STEP * STEP, end, STEP):
        sums = zeros_f32(SUMS)
        for c in range(width):
            keys = load_tuple(k, c * TILE + t, LANES, TILE_VECTORS)
            sums = fma_grid(sums, keys, q, c, 0, width)
        store_grid(logits, t, LANES, TILE, TILE_VECTORS, sums)


@njit
def add_p_v(out: Address, p: Address, v: Address, first: int, end: int, latent_dim: int) -> None:
    """out [TILE_ROWS, latent_dim] += p [TILE_ROWS, TILE] v, of tokens `first` to `end` - 1."""
    whole = latent_dim // STEP * STEP
    for c in range(0, whole, STEP):
        sums = load_grid(out, c, LANES, latent_dim, TILE_VECTORS, TILE_ROWS)
        for t in range(first, end):
            values = load_tuple(v, c * TILE + t * LANES, TILE * LANES, TILE_VECTORS)
            sums = fma_grid(sums, values, p, t, 0, TILE)
        store_grid(out, c, LANES, latent_dim, TILE_VECTORS, sums)
    for c in range(whole, latent_dim, LANES):
        last = load_grid(out, c, LANES, latent_dim, 1, TILE_ROWS)
        for t in range(first, end):
            values = load_tuple(v, c * TILE + t * LANES, TILE * LANES, 1)
            last = fma_grid(last, values, p, t, 0, TILE)
        store_grid(out, c, LANES, latent_dim, 1, last)


@njit
def first_seen(job: LatentJob, block: LatentBlock, row: int) -> int:
    """The first row of the segment that a row of the block sees."""
    return get_i64(job.visible, (block.token + (block.head + row) // job.n_heads) * 2)


@njit
def end_seen(job: LatentJob, block: LatentBlock, row: int) -> int:
    """The row after the last one that a row of the block sees."""
    return get_i64(job.visible, (block.token + (block.head + row) // job.n_heads) * 2 + 1)


@njit
def attend_part(
    address: Address, job: LatentJob, block: LatentBlock, piece: LatentPiece, scratch: Address
) -> None:
    """One part: its sums, references and totals, in its result or, of one, in the output."""
    latent_dim, rope_dim, n_rows = job.latent_dim, job.rope_dim, job.n_rows
    width = latent_dim + rope_dim
    softcap = get_f32(address, LATENT_SOFTCAP * 2)
    at = latent_scratch(n_rows, TILE_ROWS, latent_dim, rope_dim)
    q, out = scratch + at.q * 4, scratch + at.out * 4
    k, v, rotated = scratch + at.k * 4, scratch + at.v * 4, scratch + at.rotated * 4
    logits, totals = scratch + at.logits * 4, scratch + at.totals * 4
    scales, references = scratch + at.scales * 4, scratch + at.references * 4
    merged_totals = totals
    if block.n_parts > 1:
        out = job.partial + (block.first_part + piece.part) * part_floats(n_rows, latent_dim) * 4
        references = out + n_rows * latent_dim * 4
        merged_totals = references + n_rows * 4
    gather_queries(address, job, block, q)
    for row in range(n_rows):
        clear_row(out + row * latent_dim * 4, latent_dim, references + row * 4, totals + row * 64)

    for t0 in range(piece.first // TILE * TILE, piece.end, TILE):
        place = (get_i64(block.table, t0 // PAGE_TOKENS), 0)
        group = t0 % PAGE_TOKENS // LANES
        planes = regions(job.latent_planes, place, 0)
        where = (latent_dim // job.latent_block, group)
        call_address(job.latent_kernel, (k, scales, *planes, *where))
        planes = regions(job.rope_planes, place, 0)
        where = (rope_dim // job.rope_block, group)
        call_address(job.rope_kernel, (rotated, scales, *planes, *where))
        turn_latents(k, v, latent_dim)
        turn_rotated(rotated, k + latent_dim * TILE * 4, rope_dim, scales)
        for tile in range(0, block.n_rows, TILE_ROWS):
            last = min(tile + TILE_ROWS, block.n_rows)
            first = max(piece.first, first_seen(job, block, tile)) - t0
            first = max(0, first)
            end = min(TILE, min(piece.end, end_seen(job, block, last - 1)) - t0)
            if first >= end:
                continue
            multiply_q_k(logits, q + tile * width * 4, k, first, end, width)
            if softcap > ZERO:
                cap_logits(logits, TILE_ROWS * TILE, softcap)
            for row in range(tile, last):
                soften(
                    logits + (row - tile) * TILE * 4,
                    TILE,
                    max(piece.first, first_seen(job, block, row)) - t0,
                    min(piece.end, end_seen(job, block, row)) - t0,
                    out + row * latent_dim * 4,
                    latent_dim,
                    references + row * 4,
                    totals + row * 64,
                )
            add_p_v(out + tile * latent_dim * 4, logits, v, first, end, latent_dim)

    if block.n_parts > 1:
        for row in range(n_rows):
            put_f32(merged_totals, row, row_sum(totals + row * 64))
    else:
        for row in range(block.n_rows):
            total = row_sum(totals + row * 64)
            put_output(job, block, row, out, get_f32(references, row), total)


@njit
def put_output(
    job: LatentJob, block: LatentBlock, row: int, out: Address, reference: Float, total: Float
) -> None:
    """Output and log-sum-exp of a row of the block, from its sums in `out`."""
    factor = ZERO
    if total != ZERO:
        factor = ONE / total
    index = block.token * job.n_heads + block.head + row
    for c in range(0, job.latent_dim, LANES):
        sums = load_f32(out, row * job.latent_dim + c)
        store_f32(job.out, index * job.latent_dim + c, mul(sums, f32x16(factor)))
    put_f32(job.lse, index, log_sum_exp(reference, total))


@njit
def merge_parts(job: LatentJob, block: LatentBlock) -> None:
    """The output and log-sum-exp of a block from its parts, whose order is always the same."""
    n_rows, latent_dim = job.n_rows, job.latent_dim
    stride = part_floats(n_rows, latent_dim)
    first = job.partial + block.first_part * stride * 4
    references = n_rows * latent_dim
    totals = references + n_rows
    for row in range(block.n_rows):
        top = START
        for i in range(block.n_parts):
            top = max(top, get_f32(first, i * stride + references + row))
        merged = first + row * latent_dim * 4
        total = ZERO
        for i in range(block.n_parts):
            weight = np.exp2(get_f32(first, i * stride + references + row) - top)
            total += weight * get_f32(first, i * stride + totals + row)
            if i == 0:
                fade(merged, latent_dim, weight)
                continue
            for c in range(0, latent_dim, LANES):
                part = mul(load_f32(merged, i * stride + c), f32x16(weight))
                store_f32(merged, c, add(load_f32(merged, c), part))
        put_output(job, block, row, first, top, total)


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    job = read_job(address)
    scratch = job.scratch + thread * job.scratch_floats * 4
    while True:
        index = take_next(address)
        if index >= job.n_pieces:
            break
        piece = read_piece(job.pieces, index)
        block = read_block(job.blocks, piece.block)
        attend_part(address, job, block, piece, scratch)
        if block.n_parts > 1:
            done = take_next(job.done + piece.block * 8)
            if done + 1 == block.n_parts:
                merge_parts(job, block)
