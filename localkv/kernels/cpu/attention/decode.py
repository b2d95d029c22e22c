"""Decode attention: few rows of queries over long contexts, split along the context.

A worker (see `thread_pool`) takes one *chunk*, some pages of one sequence, of one KV head at a
time. For each *part* of it, pages whose sums are rounded separately whatever the chunks, it
leaves an unnormalised output with its maximum and sum of exponentials. Whoever finishes the last
chunk of a sequence and KV head merges its parts (split softmax: Rabe & Staats 2021; Dao et al.,
Flash-Decoding, 2023). The products are functions of K's and V's type, called by address.
"""

from __future__ import annotations

from numba import cfunc, njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.jobs import OF_HEAD, PLANE, Chunk, Job, Sequence
from localkv.kernels.cpu.attention.queries import (
    add_distances,
    end_visible,
    first_visible,
    gather_queries,
    merge_parts,
    read_chunk,
    read_sequence,
    region,
    regions,
    rows_seen,
    softcap_of,
    split_queries,
)
from localkv.kernels.cpu.attention.sizes import CHUNK, part_result, row_scratch
from localkv.kernels.cpu.attention.softmax import ZERO, cap_logits, clear_row, row_sum, soften
from localkv.simd import LANES
from localkv.simd.arithmetic import add, sum_lanes, zero_f32
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import (
    call_address,
    get_i64,
    load_f32,
    prefetch,
    put_f32,
    reader,
    store_f32,
    take_next,
)

read_job = reader(Job)

row_scratch, part_result = njit(row_scratch), njit(part_result)
GROUPS = PAGE_TOKENS // LANES
"""Groups of tokens of a page."""
FIRST_PART = 8
"""The part of a thread's first page that is fetched at once, as a divisor."""
LARGEST = 4
"""The plane of codes, listed once more: what is worth fetching ahead."""


@njit
def sum_blocks(job: Job, q: Address, sums: Address) -> None:
    """The sum of each block of K's of each row of q, which K's minima are multiplied with."""
    for i in range(job.n_rows * job.head_dim // job.k_block):
        total = zero_f32()
        for c in range(0, job.k_block, LANES):
            total = add(total, load_f32(q, i * job.k_block + c))
        put_f32(sums, i, sum_lanes(total))


@njit
def keep_queries(q: Address, n: Count, kept: Address) -> None:
    """Copy q, which becomes digits."""
    for c in range(0, n, LANES):
        store_f32(kept, c, load_f32(q, c))


@njit
def fetch_scales(planes: Address, place: tuple[int, int]) -> None:
    """Ask for all planes of a page and KV head but the codes, which kernels fetch step by step."""
    for plane in range(4):
        n_bytes = get_i64(planes, plane * PLANE + OF_HEAD)
        if get_i64(planes, plane * PLANE) != get_i64(planes, LARGEST * PLANE):
            for at in range(0, n_bytes, 64):
                prefetch(region(planes, plane, place, 0), at)


@njit
def start_fetching(planes: Address, place: tuple[int, int], row: int) -> Address:
    """Ask for the first groups, from a row on, of a page that nobody has asked for; where the
    others begin.

    Groups that are multiplied at once are read side by side, so there are some.
    """
    fetch_scales(planes, place)
    codes = region(planes, LARGEST, place, row)
    n_bytes = get_i64(planes, LARGEST * PLANE + OF_HEAD) // FIRST_PART
    for at in range(0, n_bytes, 64):
        prefetch(codes, at)
    return codes + n_bytes


@njit
def chunk_and_head(job: Job, piece: int) -> tuple[Chunk, int]:
    """What a piece is. All chunks of a KV head come one after the other, so that a thread makes
    digits of its queries once."""
    n_chunks = job.n_pieces // job.n_kv_heads
    return read_chunk(job.pieces, piece % n_chunks), piece // n_chunks


@njit
def first_place(job: Job, piece: int) -> tuple[tuple[int, int], int]:
    """The first page and KV head of a piece, and the first row that is read there."""
    chunk, head = chunk_and_head(job, piece)
    sequence, page = read_sequence(job.sequences, chunk.sequence), chunk.first_page
    return (get_i64(sequence.table, page), head), rows_seen(job, sequence, page)[0]


@njit
def part_at(job: Job, sequence: Sequence, head: int, part: int) -> Address:
    """The address of a part's result (see `PartResult`) among a sequence's and KV head's."""
    index = (sequence.first_part + part) * job.n_kv_heads + head
    return job.partial + index * part_result(job.n_rows, job.head_dim).end * 4


@njit
def finish_part(job: Job, partial: Address, totals: Address) -> None:
    """Add up what is left of sums in 16 lanes."""
    result = part_result(job.n_rows, job.head_dim)
    for row in range(job.n_rows):
        put_f32(partial, result.totals + row, row_sum(totals + row * 64))


@njit
def prepare_queries(
    address: Address, job: Job, sequence: Sequence, head: int, scratch: Address
) -> None:
    """The queries of a sequence and KV head as K's kernel takes them."""
    n_rows, head_dim = job.n_rows, job.head_dim
    at = row_scratch(n_rows, n_rows // job.n_tiles, head_dim)
    q, sums = scratch + at.q * 4, scratch + at.sums * 4
    gather_queries(address, job, q, sequence.token, head, 0, sequence.n_new * job.group, n_rows)
    if job.k_affine:
        sum_blocks(job, q, sums)
    if job.k_outliers:
        keep_queries(q, n_rows * head_dim, sums)
    if job.k_digits:
        split_queries(q, n_rows * (head_dim // job.k_block), job.k_offset)


@njit
def attend_chunk(
    address: Address,
    job: Job,
    chunk: Chunk,
    sequence: Sequence,
    head: int,
    scratch: Address,
    is_first: bool,
) -> int:
    """One chunk and KV head, whose queries are prepared: leaves the results of its parts. Returns
    the piece to take next, which is the thread's own as soon as its memory is fetched; nobody has
    fetched the first one's."""
    head_dim, group, n_rows, token = job.head_dim, job.group, job.n_rows, sequence.token
    k_blocks, v_blocks = head_dim // job.k_block, head_dim // job.v_block
    k_steps, v_steps = k_blocks * GROUPS, v_blocks * GROUPS
    softcap = softcap_of(address)

    at, result = row_scratch(n_rows, n_rows // job.n_tiles, head_dim), part_result(n_rows, head_dim)
    q, sums, logits = scratch + at.q * 4, scratch + at.sums * 4, scratch + at.logits * 4
    totals, scaled = scratch + at.totals * 4, scratch + at.scaled * 4
    partial, references = job.partial, job.partial  # of the part at hand

    n_used = sequence.n_new * group

    end_page, coming = chunk.first_page + chunk.n_pages, job.n_pieces
    for page in range(chunk.first_page, end_page):
        if page == chunk.first_page or page % sequence.part_pages == 0:
            if page != chunk.first_page:
                finish_part(job, partial, totals)
            part = page // sequence.part_pages - sequence.skipped_parts
            partial = part_at(job, sequence, head, part)
            references = partial + result.references * 4
            for row in range(n_rows):
                out = partial + row * head_dim * 4
                clear_row(out, head_dim, references + row * 4, totals + row * 64)
        first, end = rows_seen(job, sequence, page)
        n_tokens, first_row = end - first, page * PAGE_TOKENS + first
        n_padded = (n_tokens + CHUNK - 1) // CHUNK * CHUNK
        place = (get_i64(sequence.table, page), head)
        # what is read after this page: the next one, or the first one of the piece to take next
        after, after_row = place, first
        if page + 1 < end_page:
            after, after_row = (get_i64(sequence.table, page + 1), head), 0
        else:
            coming = take_next(address)
            if coming < job.n_pieces:
                after, after_row = first_place(job, coming)
        next_k = region(job.k_planes, LARGEST, after, after_row)
        next_v = region(job.v_planes, LARGEST, after, after_row)
        fetch_scales(job.v_planes, place)
        k_run, k_lines = next_k, job.k_early
        if is_first and page == chunk.first_page:
            k_run = start_fetching(job.k_planes, place, first)
            k_lines = get_i64(job.k_planes, LARGEST * PLANE + OF_HEAD) // (64 * k_steps)
        call_address(
            job.k_kernel,
            (
                logits,
                q,
                sums,
                *regions(job.k_planes, place, first),
                k_blocks,
                n_tokens,
                job.n_tiles,
                region(job.v_planes, LARGEST, place, first) + job.v_early * v_steps * 64,
                job.v_ahead,
                k_run,
                k_lines,
            ),
        )
        if softcap > ZERO:
            cap_logits(logits, n_used * PAGE_TOKENS, softcap)
        for row in range(n_used):
            if job.slopes:
                of = token * group + row
                add_distances(job, logits + row * PAGE_TOKENS * 4, n_padded, head, of, first_row)
            soften(
                logits + row * PAGE_TOKENS * 4,
                n_padded,
                first_visible(job, token + row // group) - first_row,
                min(n_tokens, end_visible(job, token + row // group) - first_row),
                partial + row * head_dim * 4,
                head_dim,
                references + row * 4,
                totals + row * 64,
            )
        fetch_scales(job.k_planes, after)
        call_address(
            job.v_kernel,
            (
                partial,
                logits,
                scaled,
                *regions(job.v_planes, place, first),
                v_blocks,
                n_tokens,
                job.n_tiles,
                next_k + job.k_early * k_steps * 64,
                job.k_ahead,
                next_v,
                job.v_early,
            ),
        )
    finish_part(job, partial, totals)
    return coming


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    job = read_job(address)
    scratch = job.scratch + thread * job.scratch_floats * 4
    piece, is_first = take_next(address), True
    prepared = (-1, -1)
    while piece < job.n_pieces:
        chunk, head = chunk_and_head(job, piece)
        sequence = read_sequence(job.sequences, chunk.sequence)
        if prepared != (chunk.sequence, head):
            prepare_queries(address, job, sequence, head, scratch)
            prepared = (chunk.sequence, head)
        piece = attend_chunk(address, job, chunk, sequence, head, scratch, is_first)
        is_first = False
        done = take_next(job.done + (chunk.sequence * job.n_kv_heads + head) * 8)
        if done + 1 == sequence.n_chunks:
            parts = part_at(job, sequence, head, 0)
            stride = job.n_kv_heads * part_result(job.n_rows, job.head_dim).end
            merge_parts(job, sequence, head, parts, stride)
