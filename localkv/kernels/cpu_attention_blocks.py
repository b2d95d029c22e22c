"""Prefill attention: blocks of query rows over tiles of K and V that are decoded to float32.

A worker (see `cpu_parallel`) takes a block of new tokens of one sequence, for one KV head, at a
time: at most `BLOCK_ROWS` rows (token, query head). It decodes 64 tokens of K and V at a time into
its cache and folds them in by online softmax (Milakov & Gimelshein 2018). The decoders are
functions of K's and V's type, called by address; this file is compiled once for all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu_attention_job import (
    BLOCK_COLUMNS,
    BLOCK_LENGTH,
    BLOCK_TABLE,
    BLOCK_TOKEN,
    BLOCK_TOKENS,
    GROUP,
    HEAD_DIM,
    K_BLOCK,
    K_KERNEL,
    K_PLANES,
    LSE,
    N_ITEMS,
    N_KV_HEADS,
    OUT,
    PIECES,
    SCALE,
    SCRATCH,
    SCRATCH_FLOATS,
    V_BLOCK,
    V_KERNEL,
    V_PLANES,
    VISIBLE,
    Q,
    region,
)
from localkv.kernels.cpu_softmax import LOWEST, ONE, ZERO, fade, soften
from localkv.simd.arithmetic import f32x16, mul, zero_f32
from localkv.simd.cpu_features import HAS_AVX512
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
from localkv.simd.vector_tuple import (
    fma_grid,
    load_grid,
    load_tuple,
    store_grid,
    store_tuple,
    zeros_f32,
)

CACHE = False
PAGE = 256
TILE = 64
"""Tokens of K and V decoded at a time; divides a page."""
BLOCK_ROWS = 96
ROWS = 8 if HAS_AVX512 else 2
"""Rows whose sums are in registers at once, two vectors each; divides BLOCK_ROWS."""
SUMS = 2 * ROWS


@njit
def multiply_q_k(logits: Any, q: Any, k: Any, head_dim: int) -> None:
    """logits [ROWS, TILE] = q [ROWS, head_dim] k [head_dim, TILE]."""
    for t in range(0, TILE, 2 * LANES):
        sums = zeros_f32(SUMS)
        for c in range(head_dim):
            at = c * TILE + t
            keys = (load_f32(k, at), load_f32(k, at + LANES))
            sums = fma_grid(sums, keys, q, c, 0, head_dim)
        store_grid(logits, t, LANES, TILE, 2, sums)


@njit
def add_p_v(out: Any, p: Any, v: Any, n_tokens: int, head_dim: int) -> None:
    """out [ROWS, head_dim] += p [ROWS, TILE] v [TILE, head_dim], the first `n_tokens` of it."""
    pairs = head_dim // (2 * LANES) * (2 * LANES)
    for c in range(0, pairs, 2 * LANES):
        sums = load_grid(out, c, LANES, head_dim, 2, ROWS)
        for t in range(n_tokens):
            at = t * head_dim + c
            sums = fma_grid(sums, (load_f32(v, at), load_f32(v, at + LANES)), p, t, 0, TILE)
        store_grid(out, c, LANES, head_dim, 2, sums)
    if pairs < head_dim:
        last = load_tuple(out, pairs, head_dim, ROWS)
        for t in range(n_tokens):
            last = fma_grid(last, (load_f32(v, t * head_dim + pairs),), p, t, 0, TILE)
        store_tuple(out, pairs, head_dim, last)


@njit
def attend_block(job: Any, entry: Any, head: int, scratch: Any) -> None:
    """One block of new tokens and one KV head."""
    head_dim, group = get_i64(job, HEAD_DIM), get_i64(job, GROUP)
    n_kv_heads = get_i64(job, N_KV_HEADS)
    token, length = get_i64(entry, BLOCK_TOKEN), get_i64(entry, BLOCK_LENGTH)
    n_rows = get_i64(entry, BLOCK_TOKENS) * group
    padded = (n_rows + ROWS - 1) // ROWS * ROWS
    table = get_i64(entry, BLOCK_TABLE)
    visible = get_i64(job, VISIBLE) + token * 8
    k_planes, v_planes = get_i64(job, K_PLANES), get_i64(job, V_PLANES)
    k_blocks, v_blocks = head_dim // get_i64(job, K_BLOCK), head_dim // get_i64(job, V_BLOCK)

    q = scratch
    out = q + BLOCK_ROWS * head_dim * 4
    k = out + BLOCK_ROWS * head_dim * 4
    v = k + TILE * head_dim * 4
    logits = v + TILE * head_dim * 4
    tops = logits + BLOCK_ROWS * TILE * 4
    totals = tops + BLOCK_ROWS * 4
    scales = totals + BLOCK_ROWS * 4

    scale = f32x16(get_f32(job, SCALE * 2))
    end = 0  # tokens that any row sees
    for row in range(padded):
        source = ((token + row // group) * n_kv_heads + head) * group + row % group
        for c in range(0, head_dim, LANES):
            x = zero_f32()
            if row < n_rows:
                x = mul(load_f32(get_i64(job, Q), source * head_dim + c), scale)
            store_f32(q, row * head_dim + c, x)
            store_f32(out, row * head_dim + c, zero_f32())
        put_f32(tops, row, LOWEST)
        put_f32(totals, row, ZERO)
        if row < n_rows:
            end = max(end, get_i64(visible, row // group))

    for t0 in range(0, end, TILE):
        place = get_i64(table, t0 // PAGE) * n_kv_heads + head
        first_group = t0 % PAGE // LANES
        call_address(
            get_i64(job, K_KERNEL),
            (
                k,
                scales,
                region(k_planes, 0, place),
                region(k_planes, 1, place),
                region(k_planes, 2, place),
                region(k_planes, 3, place),
                k_blocks,
                first_group,
            ),
        )
        call_address(
            get_i64(job, V_KERNEL),
            (
                v,
                scales,
                region(v_planes, 0, place),
                region(v_planes, 1, place),
                region(v_planes, 2, place),
                region(v_planes, 3, place),
                v_blocks,
                first_group,
            ),
        )
        n_tokens = min(TILE, length - t0)
        for first in range(0, padded, ROWS):
            tile_out, tile_logits = out + first * head_dim * 4, logits + first * TILE * 4
            multiply_q_k(tile_logits, q + first * head_dim * 4, k, head_dim)
            for row in range(first, first + ROWS):
                n_visible = 0
                if row < n_rows:
                    n_visible = get_i64(visible, row // group) - t0
                top = get_f32(tops, row)
                top, factor, total = soften(logits + row * TILE * 4, TILE, n_visible, top)
                fade(out + row * head_dim * 4, head_dim, factor)
                put_f32(tops, row, top)
                put_f32(totals, row, get_f32(totals, row) * factor + total)
            add_p_v(tile_out, tile_logits, v, n_tokens, head_dim)

    for row in range(n_rows):
        at = ((token + row // group) * n_kv_heads + head) * group + row % group
        total = get_f32(totals, row)
        factor, log_sum = ZERO, np.float32(-np.inf)
        if total > ZERO:
            factor, log_sum = ONE / total, get_f32(tops, row) + np.log(total)
        put_f32(get_i64(job, LSE), at, log_sum)
        for c in range(0, head_dim, LANES):
            x = mul(load_f32(out, row * head_dim + c), f32x16(factor))
            store_f32(get_i64(job, OUT), at * head_dim + c, x)


@cfunc("void(int64, int64)", cache=CACHE, error_model="numpy")
def worker(job: Any, thread: Any) -> None:
    scratch = get_i64(job, SCRATCH) + thread * get_i64(job, SCRATCH_FLOATS) * 4
    n_kv_heads = get_i64(job, N_KV_HEADS)
    while True:
        item = take_next(job)
        if item >= get_i64(job, N_ITEMS):
            break
        entry = get_i64(job, PIECES) + item // n_kv_heads * BLOCK_COLUMNS * 8
        attend_block(job, entry, item % n_kv_heads, scratch)
