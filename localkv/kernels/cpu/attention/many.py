"""Attention of many generated tokens of a sequence: blocks of rows over pages, a page at a time.

A worker (see `thread_pool`) takes a block of rows (new token, query head) of one sequence and one
KV head, at most `BLOCK_ROWS`. As for a prompt (`attention/prefill.py`) it decodes `TILE` tokens of
K and V at a time for all of its rows. But what it adds up, and in which order, is what the decode
kernels do (`attention/decode.py`), so that a generated token has the bits that it has alone:

- A logit is the sum of the sums of 16 channels each (`attention/score.py`).
- Logits of a page become weights at once.
- Values of even tokens of a page are added to what there is, and odd ones' to a sum of
  their own, which joins at the end of the page (`attention/weigh.py`).
- Parts of the context are summed separately and merged at last.

Only for types whose values are floats without scales. The decoders are functions of K's and V's
type, called by address; this file is compiled once for all.
"""

from __future__ import annotations

from numba import cfunc, njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.jobs import TILE_ROWS, TILE_VECTORS, Chunk, Job, Sequence
from localkv.kernels.cpu.attention.queries import (
    add_distances,
    end_visible,
    first_visible,
    gather_queries,
    merge_parts,
    read_chunk,
    read_sequence,
    regions,
    rows_seen,
    softcap_of,
)
from localkv.kernels.cpu.attention.sizes import TILE, part_result, run_block_scratch
from localkv.kernels.cpu.attention.softmax import ZERO, cap_logits, clear_row, row_sum, soften
from localkv.simd import LANES
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import call_address, get_i64, put_f32, reader, take_next
from localkv.simd.vector import (
    add_each,
    fma_grid,
    load_grid,
    load_tuple,
    store_grid,
    store_tuple,
    zeros_f32,
)

read_job = reader(Job)

run_block_scratch, part_result = njit(run_block_scratch), njit(part_result)
ROWS = TILE_ROWS // 2
"""Rows of a tile: each has two sums, of 16 channels and of all, or of even and of odd tokens."""
STEP = TILE_VECTORS * LANES
SUMS = TILE_VECTORS * ROWS


@njit
def multiply_q_k(
    logits: Address, q: Address, k: Address, first: int, end: int, head_dim: int
) -> None:
    """logits [ROWS, PAGE_TOKENS] = q [ROWS, head_dim] k [head_dim, TILE].

    At least columns `first` to `end` - 1 are written, of TILE.
    """
    for t in range(first // STEP * STEP, end, STEP):
        total = zeros_f32(SUMS)
        for block in range(0, head_dim, LANES):
            sums = zeros_f32(SUMS)
            for c in range(block, block + LANES):
                keys = load_tuple(k, c * TILE + t, LANES, TILE_VECTORS)
                sums = fma_grid(sums, keys, q, c, 0, head_dim)
            total = add_each(total, sums)
        store_grid(logits, t, LANES, PAGE_TOKENS, TILE_VECTORS, total)


@njit
def add_p_v(out: Address, p: Address, v: Address, first: int, end: int, head_dim: int) -> None:
    """out [ROWS, STEP of head_dim] += p [ROWS, PAGE_TOKENS] v [PAGE_TOKENS, STEP of head_dim], of
    tokens from `first`, an even one, to `end` - 1."""
    even, odd = load_grid(out, 0, LANES, head_dim, TILE_VECTORS, ROWS), zeros_f32(SUMS)
    t = first
    while t < end:
        even = fma_grid(
            even, load_tuple(v, t * head_dim, LANES, TILE_VECTORS), p, t, 0, PAGE_TOKENS
        )
        t += 1
        if t < end:
            values = load_tuple(v, t * head_dim, LANES, TILE_VECTORS)
            odd = fma_grid(odd, values, p, t, 0, PAGE_TOKENS)
            t += 1
    store_grid(out, 0, LANES, head_dim, TILE_VECTORS, add_each(even, odd))


@njit
def add_p_v_last(out: Address, p: Address, v: Address, first: int, end: int, head_dim: int) -> None:
    """Add the last LANES channels, where these are no STEP."""
    even, odd = load_tuple(out, 0, head_dim, ROWS), zeros_f32(ROWS)
    t = first
    while t < end:
        even = fma_grid(even, load_tuple(v, t * head_dim, LANES, 1), p, t, 0, PAGE_TOKENS)
        t += 1
        if t < end:
            odd = fma_grid(odd, load_tuple(v, t * head_dim, LANES, 1), p, t, 0, PAGE_TOKENS)
            t += 1
    store_tuple(out, 0, head_dim, add_each(even, odd))


@njit
def seen_by_tile(job: Job, sequence: Sequence, row: int, begin: int, end: int) -> tuple[int, int]:
    """The rows from `begin` to `end` - 1 of the segment that a tile of rows sees, from row `row`
    on: first and end, relative to `begin`, which is even as the first one is."""
    last = min(row + ROWS, sequence.n_new * job.group) - 1
    first = max(begin, first_visible(job, sequence.token + row // job.group)) - begin
    stop = min(end, end_visible(job, sequence.token + last // job.group)) - begin
    return first // 2 * 2, stop


@njit
def score_page(
    job: Job, sequence: Sequence, place: tuple[int, int], page: int, scratch: Address
) -> None:
    """The logits of a page's tokens."""
    at = run_block_scratch(job.n_rows, job.n_parts, job.head_dim)
    k, scales = scratch + at.k * 4, scratch + at.scales * 4
    begin, end = rows_seen(job, sequence, page)
    for t0 in range(begin, end, TILE):
        where = (job.head_dim // job.k_block, t0 // LANES)
        call_address(job.k_kernel, (k, scales, *regions(job.k_planes, place, 0), *where))
        first_row = page * PAGE_TOKENS + t0
        for row in range(0, sequence.n_new * job.group, ROWS):
            first, stop = seen_by_tile(job, sequence, row, first_row, first_row + TILE)
            if first < stop:
                logits = scratch + (at.logits + row * PAGE_TOKENS + t0) * 4
                q = scratch + (at.q + row * job.head_dim) * 4
                multiply_q_k(logits, q, k, first, stop, job.head_dim)


@njit
def soften_page(
    address: Address,
    job: Job,
    sequence: Sequence,
    head: int,
    page: int,
    scratch: Address,
    partial: Address,
) -> None:
    """What a page's logits become as weights, up to the last TILE of tokens that a tile sees."""
    at = run_block_scratch(job.n_rows, job.n_parts, job.head_dim)
    references = partial + part_result(job.n_rows, job.head_dim).references * 4
    softcap, n_used = softcap_of(address), sequence.n_new * job.group
    begin, _ = rows_seen(job, sequence, page)
    first_row = page * PAGE_TOKENS + begin
    for tile_row in range(0, n_used, ROWS):
        first, stop = seen_by_tile(job, sequence, tile_row, first_row, (page + 1) * PAGE_TOKENS)
        if first >= stop:
            continue
        n_padded = (stop + TILE - 1) // TILE * TILE
        for row in range(tile_row, min(tile_row + ROWS, n_used)):
            logits = scratch + (at.logits + row * PAGE_TOKENS + begin) * 4
            token = sequence.token + row // job.group
            if softcap > ZERO:
                cap_logits(logits, n_padded, softcap)
            if job.slopes:
                of = sequence.token * job.group + row
                add_distances(job, logits, n_padded, head, of, first_row)
            soften(
                logits,
                n_padded,
                first_visible(job, token) - first_row,
                min(stop, end_visible(job, token) - first_row),
                partial + row * job.head_dim * 4,
                job.head_dim,
                references + row * 4,
                scratch + (at.totals + row * LANES) * 4,
            )


@njit
def weigh_page(
    job: Job,
    sequence: Sequence,
    place: tuple[int, int],
    page: int,
    scratch: Address,
    partial: Address,
) -> None:
    """partial += the weighted values of a page's tokens."""
    head_dim, n_used = job.head_dim, sequence.n_new * job.group
    at = run_block_scratch(job.n_rows, job.n_parts, head_dim)
    v, scales = scratch + at.v * 4, scratch + at.scales * 4
    begin, end = rows_seen(job, sequence, page)
    for t0 in range(begin, end, TILE):
        where = (head_dim // job.v_block, t0 // LANES)
        tile = v + t0 * head_dim * 4
        call_address(job.v_kernel, (tile, scales, *regions(job.v_planes, place, 0), *where))
    first_row, whole = page * PAGE_TOKENS, head_dim // STEP * STEP
    for c in range(0, head_dim, STEP):
        for row in range(0, n_used, ROWS):
            first, stop = seen_by_tile(job, sequence, row, first_row, first_row + PAGE_TOKENS)
            if first >= stop:
                continue
            p = scratch + (at.logits + row * PAGE_TOKENS) * 4
            out, values = partial + (row * head_dim + c) * 4, v + c * 4
            if c < whole:
                add_p_v(out, p, values, first, stop, head_dim)
            else:
                add_p_v_last(out, p, values, first, stop, head_dim)


@njit
def attend_run(
    address: Address, job: Job, chunk: Chunk, sequence: Sequence, head: int, scratch: Address
) -> None:
    """One block of rows and one KV head."""
    head_dim, n_rows = job.head_dim, job.n_rows
    at = run_block_scratch(n_rows, job.n_parts, head_dim)
    result = part_result(n_rows, head_dim)
    parts, totals = scratch + at.parts * 4, scratch + at.totals * 4
    partial = parts  # of the part at hand
    n_used = sequence.n_new * job.group
    gather_queries(address, job, scratch + at.q * 4, sequence.token, head, 0, n_used, n_rows)
    end_page = chunk.first_page + chunk.n_pages
    for page in range(chunk.first_page, end_page):
        if page == chunk.first_page or page % sequence.part_pages == 0:
            part = page // sequence.part_pages - sequence.skipped_parts
            partial = parts + part * result.end * 4
            for row in range(n_rows):
                references = partial + (result.references + row) * 4
                clear_row(partial + row * head_dim * 4, head_dim, references, totals + row * 64)
        place = (get_i64(sequence.table, page), head)
        score_page(job, sequence, place, page, scratch)
        soften_page(address, job, sequence, head, page, scratch, partial)
        weigh_page(job, sequence, place, page, scratch, partial)
        if page + 1 == end_page or (page + 1) % sequence.part_pages == 0:
            for row in range(n_rows):
                put_f32(partial, result.totals + row, row_sum(totals + row * 64))
    merge_parts(job, sequence, head, parts, result.end)


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    job = read_job(address)
    scratch = job.scratch + thread * job.scratch_floats * 4
    while True:
        piece = take_next(address)
        if piece >= job.n_pieces:
            break
        chunk = read_chunk(job.pieces, piece // job.n_kv_heads)
        sequence = read_sequence(job.sequences, chunk.sequence)
        attend_run(address, job, chunk, sequence, piece % job.n_kv_heads, scratch)
