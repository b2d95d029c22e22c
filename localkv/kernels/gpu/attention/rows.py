"""The addressing that decode and prefill attention share: rows of queries, K, V and outputs.

Queries of a KV head are numbered in a sequence: query i is token i // GROUP, in head i % GROUP of
the group. Prefill has a query in each row of a matrix, decoding, where keys are the rows, in each
column (COLUMNS).
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.gpu.attention.online_softmax import LN_2, query

PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def row_of(i, start, head, N_KV_HEADS: tl.constexpr, GROUP: tl.constexpr):
    """Which of q's [tokens * heads] rows is query `i` of a sequence that starts at `start`."""
    return ((start + i // GROUP) * N_KV_HEADS + head).to(tl.int64) * GROUP + i % GROUP


@triton.jit
def position_of(i, start, is_query, positions_ptr, first_position, GROUP: tl.constexpr):
    """The positions of queries, counted from the first row of the segment."""
    position = tl.load(positions_ptr + start + i // GROUP, mask=is_query, other=0)
    return (position - first_position).to(tl.int32)


@triton.jit
def page_of_tile(pages, at):
    """The page of key `at`, int64, by the page table."""
    return tl.load(pages + at // PAGE).to(tl.int64)


@triton.jit
def row_of_tile(
    page, at, head, N_KV_HEADS: tl.constexpr, KEYS: tl.constexpr, PAGE_BYTES: tl.constexpr
):
    """The first row of a tile, that of key `at`, in the planes that `in_page` gives."""
    entry = at // PAGE
    if PAGE_BYTES:
        first_row = tl.cast(head - entry, tl.int64) * PAGE + at
    else:
        first_row = (page * N_KV_HEADS + head - entry) * PAGE + at
    return tl.multiple_of(first_row, KEYS)


@triton.jit
def place(ptr, row, is_query, channel, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Addresses of channels of rows, and which of them there are."""
    if COLUMNS:
        at = ptr + row[None, :] * HEAD_DIM + channel[:, None]
        return at, is_query[None, :] & (channel < HEAD_DIM)[:, None]
    else:
        at = ptr + row[:, None] * HEAD_DIM + channel[None, :]
        return at, is_query[:, None] & (channel < HEAD_DIM)[None, :]


@triton.jit
def load_queries(
    q_ptr, row, is_query, channel,
    HEAD_DIM: tl.constexpr, PRODUCT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some channels of queries, as the operand of a product."""
    at, mask = place(q_ptr, row, is_query, channel, HEAD_DIM, COLUMNS)
    return query(tl.load(at, mask=mask, other=0.0), PRODUCT)


@triton.jit
def store_outputs(
    out_ptr, out, row, is_query, channel, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr
):
    """Some channels of outputs."""
    at, mask = place(out_ptr, row, is_query, channel, HEAD_DIM, COLUMNS)
    tl.store(at, out, mask=mask)


@triton.jit
def log_sum_exp(largest, total):
    """The natural logarithm of a sum of exponentials to base 2, whose largest exponent is given;
    minus infinity of an empty sum, NaN of NaN."""
    return tl.where(total != 0, largest * LN_2 + tl.log(total), -float("inf"))
