"""Attention over latents: a tile of packed rows is decoded once, as keys and as values.

A program has a block of rows of queries (new token, head) and a share of the context, all of it for
prompts. Shares are added up by `merge_latents_kernel`, weighted by their log-sum-exp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.kernels.gpu.attention.softmax import (
    LOWEST,
    dot,
    log_sum_exp,
    page_of_tile,
    place,
    position_of,
    query,
    rounded_to,
    row_of,
    row_of_tile,
    scaled_logits,
    store_outputs,
    tail_begin,
)


@triton.jit
def _queries(ptr, row, is_query, channel, N: tl.constexpr, PRODUCT: tl.constexpr):
    """Some channels of queries. They are loaded for each tile, since all of them would take more
    registers than there are."""
    at, mask = place(ptr, row, is_query, channel, N, False)
    return query(tl.load(at, mask=mask, other=0.0, volatile=True), PRODUCT)


@triton.jit(do_not_specialize=["first_position", "table_width", "tail_start", "tail_newest"])
def latents_kernel(
    q_ptr,
    q_rotated_ptr,
    k_planes,
    v_planes,
    page_table_ptr,
    lengths_ptr,
    starts_ptr,
    positions_ptr,
    out_ptr,
    lse_ptr,
    first_position,
    table_width,
    scale,
    softcap,
    exact_ptr,
    tail_start,
    tail_newest,
    READ_K: tl.constexpr,
    COLUMNS_K: tl.constexpr,
    PRODUCT_K: tl.constexpr,
    UNIT_K: tl.constexpr,
    READ_V: tl.constexpr,
    COLUMNS_V: tl.constexpr,
    PRODUCT_V: tl.constexpr,
    UNIT_V: tl.constexpr,
    N_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    LATENT_WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PTX: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_TOKENS: tl.constexpr,
):
    """Grid (blocks of QUERIES, splits, sequences).

    Args:
        q_ptr, q_rotated_ptr: [tokens, N_HEADS, LATENT_DIM] and [tokens, N_HEADS, ROPE_DIM].
        k_planes, v_planes: tuples of uint8 pointers, of the latents and of the rotated parts.
        page_table_ptr: int64 [sequences, table_width].
        lengths_ptr: int32 [sequences], rows in this segment.
        starts_ptr: int32 [sequences + 1], offsets of the sequences' tokens in q.
        positions_ptr: int64 [tokens].
        out_ptr, lse_ptr: fp32 [tokens, heads, splits, LATENT_DIM] and [tokens, heads, splits]; of
            a split without keys 0 and -inf.
        first_position: position of the segment's row 0.
        exact_ptr, tail_start, tail_newest, TAIL, TAIL_TOKENS: as `decode_kernel` has them.
        UNIT_K, UNIT_V: as `decode_kernel` has them.
        KEYS: rows of a tile; divides a page.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the longest rows come first
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    n_splits = tl.num_programs(1)
    start = tl.load(starts_ptr + sequence)
    n_queries = (tl.load(starts_ptr + sequence + 1) - start) * N_HEADS
    if block * QUERIES >= n_queries:
        return

    i = block * QUERIES + tl.arange(0, QUERIES)
    is_query = i < n_queries
    row = row_of(i, start, 0, 1, N_HEADS)
    position = position_of(i, start, is_query, positions_ptr, first_position, N_HEADS)
    length = tl.load(lengths_ptr + sequence)
    length = tl.minimum(length, tl.max(tl.where(is_query, position, -1), 0) + 1)
    first_tile = 0
    least = 0
    if TAIL:
        tail = tail_begin(
            position, first_position, exact_ptr, sequence, tail_start, tail_newest, TAIL_TOKENS
        )
        if TAIL == 1:
            length = tl.minimum(length, tl.max(tl.where(is_query, tail, 0), 0))
        else:
            least = tl.min(tl.where(is_query, tail, length), 0)
            first_tile = least // KEYS
    share = tl.cdiv(tl.maximum(tl.cdiv(length, KEYS) - first_tile, 0), n_splits)
    begin = (first_tile + split * share) * KEYS
    end = tl.minimum(begin + share * KEYS, length)

    k_low, k_high = COLUMNS_K(LATENT_WIDTH)
    v_low, v_high = COLUMNS_V(ROPE_WIDTH)
    largest = tl.full((QUERIES,), LOWEST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out_low = tl.zeros((QUERIES, LATENT_WIDTH // 2), tl.float32)
    out_high = tl.zeros((QUERIES, LATENT_WIDTH // 2), tl.float32)
    pages = page_table_ptr + sequence * table_width
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        first_row = row_of_tile(page_of_tile(pages, at), at, 0, 1, KEYS, PAGE_BYTES=0)
        key = at + tl.arange(0, KEYS)
        valid = key < end
        if TAIL == 2:  # rows before may never have been stored
            valid = valid & (key >= least)
        low, high = READ_V(v_planes, first_row, valid, ROPE_DIM, ROPE_WIDTH, PTX)
        q = _queries(q_rotated_ptr, row, is_query, v_low, ROPE_DIM, PRODUCT_V)
        products = dot(q, tl.trans(low), None, PRODUCT_V)
        q = _queries(q_rotated_ptr, row, is_query, v_high, ROPE_DIM, PRODUCT_V)
        products = dot(q, tl.trans(high), products, PRODUCT_V)
        if UNIT_V != UNIT_K:
            products = products * (UNIT_V / UNIT_K)
        low, high = READ_K(k_planes, first_row, valid, LATENT_DIM, LATENT_WIDTH, PTX)
        q = _queries(q_ptr, row, is_query, k_low, LATENT_DIM, PRODUCT_K)
        products = dot(q, tl.trans(low), products, PRODUCT_K)
        q = _queries(q_ptr, row, is_query, k_high, LATENT_DIM, PRODUCT_K)
        products = dot(q, tl.trans(high), products, PRODUCT_K)
        logits = scaled_logits(products, scale * UNIT_K, softcap, SOFTCAP)
        seen = valid[None, :] & (key[None, :] <= position[:, None])
        if TAIL == 1:
            seen = seen & (key[None, :] < tail[:, None])
        if TAIL == 2:
            seen = seen & (key[None, :] >= tail[:, None])
        logits = tl.where(seen, logits, -float("inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        weights = tl.exp2(logits - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        largest = larger
        weights = rounded_to(weights, PRODUCT_K)
        out_low = dot(weights, low, out_low * shrink[:, None], PRODUCT_K)
        out_high = dot(weights, high, out_high * shrink[:, None], PRODUCT_K)

    row = row * n_splits + split
    tl.store(lse_ptr + row, log_sum_exp(largest, total), mask=is_query)
    norm = UNIT_K / tl.where(total != 0, total, 1.0)[:, None]  # NaN too, so that it shows
    store_outputs(out_ptr, out_low * norm, row, is_query, k_low, LATENT_DIM, COLUMNS=False)
    store_outputs(out_ptr, out_high * norm, row, is_query, k_high, LATENT_DIM, COLUMNS=False)


@triton.jit(do_not_specialize=["n_splits"])
def merge_latents_kernel(
    parts_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    n_splits,
    SPLITS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid (tokens * heads,): each row's splits, one after the other.

    Args:
        parts_ptr, part_lse_ptr: fp32 [rows, n_splits, LATENT_DIM] and [rows, n_splits].
        out_ptr, lse_ptr: fp32 [rows, LATENT_DIM] and [rows].
        SPLITS: a power of two, n_splits at least.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SPLITS)
    j = tl.arange(0, WIDTH)
    lse = tl.load(part_lse_ptr + row * n_splits + i, mask=i < n_splits, other=-float("inf"))
    largest = tl.maximum(tl.max(lse, 0), LOWEST)
    total = tl.sum(tl.exp(lse - largest), 0)
    out = tl.zeros((WIDTH,), tl.float32)
    for split in range(n_splits):
        at = row * n_splits + split
        weight = tl.exp(tl.load(part_lse_ptr + at) - largest)
        part = tl.load(parts_ptr + at * LATENT_DIM + j, mask=j < LATENT_DIM, other=0.0)
        out += part * weight
    seen = total != 0  # NaN too, so that it shows
    out = out / tl.where(seen, total, 1.0)
    tl.store(out_ptr + row * LATENT_DIM + j, out, mask=j < LATENT_DIM)
    tl.store(lse_ptr + row, tl.where(seen, largest + tl.log(total), -float("inf")))
