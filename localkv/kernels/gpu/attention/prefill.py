"""Attention of many new tokens per sequence: a program has a block of queries and reads all keys.

The query heads of a KV head count as further rows of the block, so K and V are decoded once for
them (see `softmax.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.kernels.gpu.attention.softmax import (
    LOG2_E,
    LOWEST,
    dot,
    first_seen,
    largest_of,
    load_queries,
    log_sum_exp,
    page_of_tile,
    position_of,
    rounded_to,
    row_of,
    row_of_tile,
    scaled_logits,
    sees,
    slopes_of,
    store_outputs,
    tail_begin,
    two_e4m3,
)
from localkv.kernels.gpu.pages import in_page


@triton.jit(
    do_not_specialize=["first_position", "table_width", "window", "tail_start", "tail_newest"]
)
def prefill_kernel(
    q_ptr, k_planes, v_planes, page_table_ptr, lengths_ptr, starts_ptr, positions_ptr, sinks_ptr,
    out_ptr, lse_ptr, first_position, table_width, scale, softcap, window, firsts_ptr, exact_ptr,
    tail_start, tail_newest, slopes_ptr,
    READ_K: tl.constexpr, COLUMNS_K: tl.constexpr, PRODUCT_K: tl.constexpr, UNIT_K: tl.constexpr,
    READ_V: tl.constexpr, COLUMNS_V: tl.constexpr, PRODUCT_V: tl.constexpr, UNIT_V: tl.constexpr,
    N_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, TAIL: tl.constexpr,
    TAIL_TOKENS: tl.constexpr, PAGE_BYTES: tl.constexpr, SINKS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of QUERIES, KV heads, sequences); see `decode_kernel` for the arguments.

    Others:
        sinks_ptr: fp32 [heads], logits of a key without a value, if SINKS.
        out_ptr, lse_ptr: [tokens, heads, VALUE_DIM] and fp32 [tokens, heads].
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the longest rows come first
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    start = tl.load(starts_ptr + sequence)
    n_queries = (tl.load(starts_ptr + sequence + 1) - start) * GROUP
    if block * QUERIES >= n_queries:
        return

    if firsts_ptr is not None:
        first_position = tl.load(firsts_ptr + sequence).to(tl.int32)
    i = block * QUERIES + tl.arange(0, QUERIES)
    is_query = i < n_queries
    row = row_of(i, start, head, N_KV_HEADS, GROUP)
    position = position_of(i, start, is_query, positions_ptr, first_position, GROUP)
    length = tl.load(lengths_ptr + sequence)
    end = tl.minimum(length, tl.max(tl.where(is_query, position, -1), 0) + 1)
    begin = 0
    if WINDOW:
        earliest = tl.min(tl.where(is_query, position, length), 0)
        begin = first_seen(earliest, first_position, window, WINDOW) // KEYS * KEYS
    least = 0
    if TAIL:
        tail = tail_begin(
            position, first_position, exact_ptr, sequence, tail_start, tail_newest, TAIL_TOKENS
        )
        if TAIL == 1:
            end = tl.minimum(end, tl.max(tl.where(is_query, tail, 0), 0))
        else:
            least = tl.min(tl.where(is_query, tail, length), 0)
            begin = tl.maximum(begin, least // KEYS * KEYS)

    k_low, k_high = COLUMNS_K(WIDTH)
    q_low = load_queries(q_ptr, row, is_query, k_low, HEAD_DIM, PRODUCT_K, COLUMNS=False)
    q_high = load_queries(q_ptr, row, is_query, k_high, HEAD_DIM, PRODUCT_K, COLUMNS=False)

    if PRODUCT_K == "e4m3":
        unit = largest_of(q_low, q_high) / 448
        q_low, q_low_rest = two_e4m3(q_low / unit[:, None])
        q_high, q_high_rest = two_e4m3(q_high / unit[:, None])

    if slopes_ptr is not None:
        slope = slopes_of(slopes_ptr, i, head, GROUP)
    largest = tl.full((QUERIES,), LOWEST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out_low = tl.zeros((QUERIES, VALUE_WIDTH // 2), tl.float32)
    out_high = tl.zeros((QUERIES, VALUE_WIDTH // 2), tl.float32)
    pages = page_table_ptr + sequence * table_width
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        page = page_of_tile(pages, at)
        first_row = row_of_tile(page, at, head, N_KV_HEADS, KEYS, PAGE_BYTES)
        key = at + tl.arange(0, KEYS)
        valid = key < end
        if TAIL == 2:  # rows before may never have been stored
            valid = valid & (key >= least)
        low, high = READ_K(
            in_page(k_planes, page, PAGE_BYTES), first_row, valid, HEAD_DIM, WIDTH, PTX
        )
        products = dot(q_low, tl.trans(low), None, PRODUCT_K)
        products = dot(q_high, tl.trans(high), products, PRODUCT_K)
        if PRODUCT_K == "e4m3":
            products = dot(q_low_rest, tl.trans(low), products, PRODUCT_K)
            products = dot(q_high_rest, tl.trans(high), products, PRODUCT_K) * unit[:, None]
        logits = scaled_logits(products, scale * UNIT_K, softcap, SOFTCAP)
        if slopes_ptr is not None:
            logits += slope[:, None] * (key[None, :] - position[:, None])
        seen = valid[None, :] & sees(
            key[None, :], position[:, None], first_position, window, WINDOW
        )
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
        low, high = READ_V(
            in_page(v_planes, page, PAGE_BYTES), first_row, valid, VALUE_DIM, VALUE_WIDTH, PTX
        )
        weights = rounded_to(weights, PRODUCT_V)
        out_low = dot(weights, low, out_low * shrink[:, None], PRODUCT_V)
        out_high = dot(weights, high, out_high * shrink[:, None], PRODUCT_V)

    if SINKS:
        sink = LOG2_E * tl.load(sinks_ptr + head * GROUP + i % GROUP)
        larger = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.exp2(sink - larger)
        out_low = out_low * shrink[:, None]
        out_high = out_high * shrink[:, None]
        largest = larger
    # plus zero, which only the GPU knows: addresses of the output are q's, and if they were
    # not computed again they would take registers all through the loop
    i += tl.load(starts_ptr + sequence, volatile=True) - start
    is_query = i < n_queries
    row = row_of(i, start, head, N_KV_HEADS, GROUP)
    tl.store(lse_ptr + row, log_sum_exp(largest, total), mask=is_query)
    norm = UNIT_V / tl.where(total != 0, total, 1.0)[:, None]  # NaN too, so that it shows
    v_low, v_high = COLUMNS_V(VALUE_WIDTH)
    store_outputs(out_ptr, out_low * norm, row, is_query, v_low, VALUE_DIM, COLUMNS=False)
    store_outputs(out_ptr, out_high * norm, row, is_query, v_high, VALUE_DIM, COLUMNS=False)
