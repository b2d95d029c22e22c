"""Attention of a few new tokens per sequence: the context is split among programs.

Each program reads its share of one sequence's rows of one KV head, once for all query heads and
tokens. It yields an output and a log-sum-exp; `merge_kernel` adds the shares up. Scores are laid
out with keys as the rows of a matrix product, since there are few queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.kernels.gpu.attention.softmax import (
    LOWEST,
    dot,
    first_seen,
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
)
from localkv.kernels.gpu.pages import in_page


@triton.jit(
    do_not_specialize=["first_position", "table_width", "window", "tail_start", "tail_newest"]
)
def decode_kernel(
    q_ptr, k_planes, v_planes, page_table_ptr, lengths_ptr, starts_ptr, positions_ptr, out_ptr,
    lse_ptr, first_position, table_width, scale, softcap, window, firsts_ptr, exact_ptr, tail_start,
    tail_newest, slopes_ptr,
    READ_K: tl.constexpr, COLUMNS_K: tl.constexpr, PRODUCT_K: tl.constexpr, UNIT_K: tl.constexpr,
    READ_V: tl.constexpr, COLUMNS_V: tl.constexpr, PRODUCT_V: tl.constexpr, UNIT_V: tl.constexpr,
    N_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, TAIL: tl.constexpr,
    TAIL_TOKENS: tl.constexpr, PAGE_BYTES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid (KV heads, splits, sequences).

    Args:
        q_ptr: [tokens, N_KV_HEADS * GROUP, HEAD_DIM].
        k_planes, v_planes: tuples of uint8 pointers.
        page_table_ptr: int64 [sequences, table_width].
        lengths_ptr: int32 [sequences], rows in this segment.
        starts_ptr: int32 [sequences + 1], offsets of the sequences' tokens in q.
        positions_ptr: int64 [tokens].
        out_ptr, lse_ptr: fp32 [tokens, heads, splits, VALUE_DIM] and [tokens, heads, splits]; of a
            split without keys only the log-sum-exp, -inf, is written.
        first_position: position of the segment's row 0.
        window: keys that a token sees, itself included, if WINDOW is 1; if it is 2, a token sees
            from the last multiple of it on.
        firsts_ptr: int64 [sequences], positions of rows 0 in place of `first_position`, or None.
        exact_ptr: int64 [sequences], positions before which no tail begins.
        tail_start, tail_newest: as `Tail` has them, if TAIL is 1, where keys are seen up to the
            tail, or 2, where only the tail's are; in multiples of TAIL_TOKENS.
        slopes_ptr: fp32 [heads], ALiBi's slopes, or None.
        WIDTH, VALUE_WIDTH: powers of two that HEAD_DIM, the channels of K, and VALUE_DIM fit in.
        QUERIES: GROUP * new tokens of a sequence at most, as a power of two.
        UNIT_K, UNIT_V: what values of tiles are multiplied with.
        KEYS: rows of a tile; divides a page.
        PAGE_BYTES: see `pages.py`.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    n_splits = tl.num_programs(1)
    start = tl.load(starts_ptr + sequence)
    n_queries = (tl.load(starts_ptr + sequence + 1) - start) * GROUP
    length = tl.load(lengths_ptr + sequence)

    if firsts_ptr is not None:
        first_position = tl.load(firsts_ptr + sequence).to(tl.int32)
    i = tl.arange(0, QUERIES)
    is_query = i < n_queries
    row = row_of(i, start, head, N_KV_HEADS, GROUP)
    position = position_of(i, start, is_query, positions_ptr, first_position, GROUP)

    first_tile = 0
    if WINDOW:
        earliest = tl.min(tl.where(is_query, position, length), 0)
        first_tile = first_seen(earliest, first_position, window, WINDOW) // KEYS
    least = 0
    if TAIL:
        tail = tail_begin(
            position, first_position, exact_ptr, sequence, tail_start, tail_newest, TAIL_TOKENS
        )
        if TAIL == 1:
            length = tl.minimum(length, tl.max(tl.where(is_query, tail, 0), 0))
        else:
            least = tl.min(tl.where(is_query, tail, length), 0)
            first_tile = tl.maximum(first_tile, least // KEYS)
    tiles = tl.maximum(tl.cdiv(length, KEYS) - first_tile, 0)
    share = tl.cdiv(tiles, n_splits)
    begin = (first_tile + split * share) * KEYS
    end = tl.minimum(begin + share * KEYS, length)

    k_low, k_high = COLUMNS_K(WIDTH)
    q_low = load_queries(q_ptr, row, is_query, k_low, HEAD_DIM, PRODUCT_K, COLUMNS=True)
    q_high = load_queries(q_ptr, row, is_query, k_high, HEAD_DIM, PRODUCT_K, COLUMNS=True)

    if slopes_ptr is not None:
        slope = slopes_of(slopes_ptr, i, head, GROUP)
    largest = tl.full((QUERIES,), LOWEST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out_low = tl.zeros((VALUE_WIDTH // 2, QUERIES), tl.float32)
    out_high = tl.zeros((VALUE_WIDTH // 2, QUERIES), tl.float32)
    pages = page_table_ptr + sequence * table_width
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        page = page_of_tile(pages, at)
        first_row = row_of_tile(page, at, head, N_KV_HEADS, KEYS, PAGE_BYTES)
        key = at + tl.arange(0, KEYS)
        valid = key < length
        if TAIL == 2:  # rows before may never have been stored
            valid = valid & (key >= least)
        low, high = READ_K(
            in_page(k_planes, page, PAGE_BYTES), first_row, valid, HEAD_DIM, WIDTH, PTX
        )
        products = dot(low, q_low, None, PRODUCT_K)
        products = dot(high, q_high, products, PRODUCT_K)
        logits = scaled_logits(products, scale * UNIT_K, softcap, SOFTCAP)
        if slopes_ptr is not None:
            logits += slope[None, :] * (key[:, None] - position[None, :])
        seen = valid[:, None] & sees(
            key[:, None], position[None, :], first_position, window, WINDOW
        )
        if TAIL == 1:
            seen = seen & (key[:, None] < tail[None, :])
        if TAIL == 2:
            seen = seen & (key[:, None] >= tail[None, :])
        logits = tl.where(seen, logits, -float("inf"))
        larger = tl.maximum(largest, tl.max(logits, 0))
        weights = tl.exp2(logits - larger[None, :])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 0)
        largest = larger
        low, high = READ_V(
            in_page(v_planes, page, PAGE_BYTES), first_row, valid, VALUE_DIM, VALUE_WIDTH, PTX
        )
        weights = rounded_to(weights, PRODUCT_V)
        out_low = dot(tl.trans(low), weights, out_low * shrink[None, :], PRODUCT_V)
        out_high = dot(tl.trans(high), weights, out_high * shrink[None, :], PRODUCT_V)

    row = row * n_splits + split
    tl.store(lse_ptr + row, log_sum_exp(largest, total), mask=is_query)
    v_low, v_high = COLUMNS_V(VALUE_WIDTH)
    seen = is_query & (total != 0)  # NaN too, so that it shows
    norm = UNIT_V / total[None, :]
    store_outputs(out_ptr, out_low * norm, row, seen, v_low, VALUE_DIM, COLUMNS=True)
    store_outputs(out_ptr, out_high * norm, row, seen, v_high, VALUE_DIM, COLUMNS=True)


@triton.jit(do_not_specialize=["n_splits"])
def merge_kernel(
    parts_ptr, part_lse_ptr, sinks_ptr, out_ptr, lse_ptr, n_splits,
    N_HEADS: tl.constexpr, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, heads).

    Args:
        parts_ptr, part_lse_ptr: fp32 [tokens, heads, n_splits, HEAD_DIM] and [..., n_splits].
        sinks_ptr: fp32 [heads], logits of a key without a value, if SINKS.
        out_ptr, lse_ptr: [tokens, heads, HEAD_DIM] and fp32 [tokens, heads].
        SPLITS: a power of two, n_splits at least.
    """
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * N_HEADS + head
    i = tl.arange(0, SPLITS)
    j = tl.arange(0, WIDTH)
    lse = tl.load(part_lse_ptr + row * n_splits + i, mask=i < n_splits, other=-float("inf"))
    largest = tl.maximum(tl.max(lse, 0), LOWEST)
    if SINKS:
        sink = tl.load(sinks_ptr + head)
        largest = tl.maximum(largest, sink)
    weights = tl.exp(lse - largest)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp(sink - largest)
    parts = tl.load(
        parts_ptr + (row * n_splits + i)[:, None] * HEAD_DIM + j[None, :],
        mask=(weights != 0)[:, None] & (j < HEAD_DIM)[None, :],
        other=0.0,
    )
    seen = total != 0  # NaN too, so that it shows
    out = tl.sum(parts * weights[:, None], 0) / tl.where(seen, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + j, out, mask=j < HEAD_DIM)
    tl.store(lse_ptr + row, tl.where(seen, largest + tl.log(total), -float("inf")))
