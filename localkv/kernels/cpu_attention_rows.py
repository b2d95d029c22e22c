"""Decode attention: few rows of queries over long contexts, split along the context.

A worker (see `cpu_parallel`) takes one *chunk*, some pages of one sequence, of one KV head at a
time, and leaves an unnormalised output with its maximum and sum of exponentials. Whoever finishes
the last chunk of a sequence and KV head merges them (split softmax: Rabe & Staats 2021; Dao et al.,
Flash-Decoding, 2023). The products are functions of K's and V's type, called by address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu_attention_job import (
    CHUNK_COLUMNS,
    CHUNK_PAGE,
    CHUNK_PAGES,
    CHUNK_SEQ,
    DONE,
    GROUP,
    HEAD_DIM,
    K_AFFINE,
    K_AHEAD,
    K_BLOCK,
    K_KERNEL,
    K_PLANES,
    LSE,
    N_ITEMS,
    N_KV_HEADS,
    N_ROWS,
    N_TILES,
    OUT,
    PARTIAL,
    PIECES,
    SCALE,
    SCRATCH,
    SCRATCH_FLOATS,
    SEQ_CHUNKS,
    SEQ_COLUMNS,
    SEQ_FIRST_CHUNK,
    SEQ_LENGTH,
    SEQ_NEW,
    SEQ_TABLE,
    SEQ_TOKEN,
    SEQUENCES,
    V_AHEAD,
    V_BLOCK,
    V_KERNEL,
    V_PLANES,
    VISIBLE,
    Q,
    region,
)
from localkv.kernels.cpu_softmax import LOWEST, ONE, ZERO, fade, soften
from localkv.simd.arithmetic import add, f32x16, mul, sum_lanes, zero_f32
from localkv.simd.memory import (
    call_address,
    get_f32,
    get_i64,
    load_f32,
    put_f32,
    store_f32,
    take_next,
)
from localkv.simd.vector import LANES

CACHE = False
PAGE = 256
LARGEST = 4
"""The plane of codes, listed once more: what is worth fetching ahead."""


@njit
def gather_queries(job: Any, q: Any, sums: Any, token: int, n_new: int, head: int) -> None:
    """Scaled rows (new token, head of the group), zeros behind them; sums of K's blocks."""
    group, head_dim = get_i64(job, GROUP), get_i64(job, HEAD_DIM)
    scale = f32x16(get_f32(job, SCALE * 2))
    heads = get_i64(job, N_KV_HEADS) * group
    n_rows = n_new * group
    source = get_i64(job, Q)
    for row in range(get_i64(job, N_ROWS)):
        at = ((token + row // group) * heads + head * group + row % group) * head_dim
        for c in range(0, head_dim, LANES):
            x = zero_f32()
            if row < n_rows:
                x = mul(load_f32(source, at + c), scale)
            store_f32(q, row * head_dim + c, x)
    if get_i64(job, K_AFFINE):
        block = get_i64(job, K_BLOCK)
        for i in range(get_i64(job, N_ROWS) * head_dim // block):
            total = zero_f32()
            for c in range(0, block, LANES):
                total = add(total, load_f32(q, i * block + c))
            put_f32(sums, i, sum_lanes(total))


@njit
def attend_chunk(job: Any, chunk: int, head: int, partial: Any, scratch: Any) -> None:
    """One chunk and KV head; `partial`: rows of `head_dim` floats, then maxima, then sums."""
    head_dim, n_rows = get_i64(job, HEAD_DIM), get_i64(job, N_ROWS)
    n_kv_heads, group, n_tiles = (
        get_i64(job, N_KV_HEADS),
        get_i64(job, GROUP),
        get_i64(job, N_TILES),
    )
    entry = get_i64(job, PIECES) + chunk * CHUNK_COLUMNS * 8
    sequence = get_i64(job, SEQUENCES) + get_i64(entry, CHUNK_SEQ) * SEQ_COLUMNS * 8
    token, n_new = get_i64(sequence, SEQ_TOKEN), get_i64(sequence, SEQ_NEW)
    length = get_i64(sequence, SEQ_LENGTH)
    table = get_i64(sequence, SEQ_TABLE)
    visible = get_i64(job, VISIBLE) + token * 8
    k_planes, v_planes = get_i64(job, K_PLANES), get_i64(job, V_PLANES)
    k_blocks, v_blocks = head_dim // get_i64(job, K_BLOCK), head_dim // get_i64(job, V_BLOCK)

    q = scratch
    sums = q + n_rows * head_dim * 4
    logits = sums + n_rows * (head_dim // LANES) * 4
    scaled = logits + n_rows * PAGE * 4

    gather_queries(job, q, sums, token, n_new, head)
    tops = partial + n_rows * head_dim * 4
    totals = tops + n_rows * 4
    for i in range(0, n_rows * head_dim, LANES):
        store_f32(partial, i, zero_f32())
    for row in range(n_rows):
        put_f32(tops, row, LOWEST)
        put_f32(totals, row, ZERO)

    first_page = get_i64(entry, CHUNK_PAGE)
    end_page = first_page + get_i64(entry, CHUNK_PAGES)
    for page in range(first_page, end_page):
        n_tokens = min(PAGE, length - page * PAGE)
        place = get_i64(table, page) * n_kv_heads + head
        # what is read after this page: the next one's K, or that of the next KV head
        after = place + 1
        if page + 1 < end_page:
            after = get_i64(table, page + 1) * n_kv_heads + head
        call_address(
            get_i64(job, K_KERNEL),
            (
                logits,
                q,
                sums,
                region(k_planes, 0, place),
                region(k_planes, 1, place),
                region(k_planes, 2, place),
                region(k_planes, 3, place),
                k_blocks,
                n_tokens,
                n_tiles,
                region(v_planes, LARGEST, place),
                get_i64(job, V_AHEAD),
            ),
        )
        for row in range(n_new * group):
            n_visible = get_i64(visible, row // group) - page * PAGE
            top = get_f32(tops, row)
            top, factor, total = soften(logits + row * PAGE * 4, n_tokens, n_visible, top)
            fade(partial + row * head_dim * 4, head_dim, factor)
            put_f32(tops, row, top)
            put_f32(totals, row, get_f32(totals, row) * factor + total)
        call_address(
            get_i64(job, V_KERNEL),
            (
                partial,
                logits,
                scaled,
                region(v_planes, 0, place),
                region(v_planes, 1, place),
                region(v_planes, 2, place),
                region(v_planes, 3, place),
                v_blocks,
                n_tokens,
                n_tiles,
                region(k_planes, LARGEST, after),
                get_i64(job, K_AHEAD),
            ),
        )


@njit
def merge_chunks(job: Any, sequence: Any, head: int, item_floats: int) -> None:
    """The output and log-sum-exp of a sequence and KV head from its chunks."""
    head_dim, n_rows = get_i64(job, HEAD_DIM), get_i64(job, N_ROWS)
    n_kv_heads, group = get_i64(job, N_KV_HEADS), get_i64(job, GROUP)
    out, lse = get_i64(job, OUT), get_i64(job, LSE)
    first_chunk, n_chunks = get_i64(sequence, SEQ_FIRST_CHUNK), get_i64(sequence, SEQ_CHUNKS)
    first = get_i64(job, PARTIAL) + (first_chunk * n_kv_heads + head) * item_floats * 4
    stride = n_kv_heads * item_floats  # from chunk to chunk, in floats
    tops, totals = n_rows * head_dim, n_rows * head_dim + n_rows
    for row in range(get_i64(sequence, SEQ_NEW) * group):
        token = get_i64(sequence, SEQ_TOKEN) + row // group
        at = token * n_kv_heads * group + head * group + row % group
        top = LOWEST
        for i in range(n_chunks):
            top = max(top, get_f32(first, i * stride + tops + row))
        total = ZERO
        for c in range(0, head_dim, LANES):
            store_f32(out, at * head_dim + c, zero_f32())
        for i in range(n_chunks):
            weight = np.exp(get_f32(first, i * stride + tops + row) - top)
            total += weight * get_f32(first, i * stride + totals + row)
            for c in range(0, head_dim, LANES):
                part = mul(load_f32(first, i * stride + row * head_dim + c), f32x16(weight))
                store_f32(out, at * head_dim + c, add(load_f32(out, at * head_dim + c), part))
        if total > ZERO:
            fade(out + at * head_dim * 4, head_dim, ONE / total)
            put_f32(lse, at, top + np.log(total))
        else:
            put_f32(lse, at, np.float32(-np.inf))


@cfunc("void(int64, int64)", cache=CACHE, error_model="numpy")
def worker(job: Any, thread: Any) -> None:
    scratch = get_i64(job, SCRATCH) + thread * get_i64(job, SCRATCH_FLOATS) * 4
    n_kv_heads = get_i64(job, N_KV_HEADS)
    item_floats = get_i64(job, N_ROWS) * (get_i64(job, HEAD_DIM) + 2)
    while True:
        item = take_next(job)
        if item >= get_i64(job, N_ITEMS):
            break
        chunk, head = item // n_kv_heads, item % n_kv_heads
        partial = get_i64(job, PARTIAL) + item * item_floats * 4
        attend_chunk(job, chunk, head, partial, scratch)
        index = get_i64(get_i64(job, PIECES) + chunk * CHUNK_COLUMNS * 8, CHUNK_SEQ)
        sequence = get_i64(job, SEQUENCES) + index * SEQ_COLUMNS * 8
        done = take_next(get_i64(job, DONE) + (index * n_kv_heads + head) * 8)
        if done + 1 == get_i64(sequence, SEQ_CHUNKS):
            merge_chunks(job, sequence, head, item_floats)
