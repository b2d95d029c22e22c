"""What decode and prefill attention share: logits, masks, weights, and the addresses of rows.

Queries of a KV head are numbered in a sequence: query i is token i // GROUP, in head i % GROUP of
the group. Prefill has a query in each row of a matrix, decoding, where keys are the rows, in each
column (COLUMNS).
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.cache.layout import PAGE_TOKENS
from localkv.triton_primitives.float_bits import F16_MAX, encode_e4m3, saturate

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)
"""Where a running maximum starts: finite, so that a row which sees nothing gets 0, not NaN."""


@triton.jit
def rounded_to(x, PRODUCT: tl.constexpr):
    """`x` as the operand of such a product."""
    if PRODUCT == "fp16":
        return x.to(tl.float16)
    else:
        return x.to(tl.float32)


@triton.jit
def query(x, PRODUCT: tl.constexpr):
    """Queries as such an operand: values too large for fp16 saturate."""
    if PRODUCT == "fp16":
        x = saturate(x.to(tl.float32), F16_MAX)
    return rounded_to(x, PRODUCT)


@triton.jit
def dot(a, b, sums, PRODUCT: tl.constexpr):
    """The matrix product ("fp16", "tf32", "tf32x3", "e4m3"), plus `sums` unless that is None."""
    if PRODUCT == "fp16" or PRODUCT == "e4m3":
        return tl.dot(a, b, sums)
    else:
        return tl.dot(a, b, sums, input_precision=PRODUCT)


@triton.jit
def largest_of(a, b):
    """fp32 [rows], the largest absolute value of rows that lie in two halves; 1 of zeros."""
    largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
    return tl.where(largest > 0, largest, 1.0)


@triton.jit
def two_e4m3(x):
    """fp32 of at most 448 as a sum of two e4m3. One alone would be off by 3 %, the sum is by about
    0.05 % of a row whose largest value is near 448."""
    codes = encode_e4m3(x)
    high = codes.to(tl.float8e4nv, bitcast=True)
    rest = encode_e4m3(x - high.to(tl.float32))
    return high, rest.to(tl.float8e4nv, bitcast=True)


@triton.jit
def scaled_logits(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Products of q and k as logits to base 2: times `scale`, then capped to +-`softcap`.

    softcap * tanh(x / softcap), as Gemma 2 has it; tanh by way of exp2.
    """
    if SOFTCAP:
        e = tl.exp2(products * (scale * 2 * LOG2_E / softcap))
        return (softcap * LOG2_E) * (1 - 2 / (e + 1))
    else:
        return products * (scale * LOG2_E)


@triton.jit
def slopes_of(slopes_ptr, i, head, GROUP: tl.constexpr):
    """ALiBi's slopes of queries, of logits to base 2."""
    return LOG2_E * tl.load(slopes_ptr + head * GROUP + i % GROUP)


@triton.jit
def sees(key, position, first_position, window, WINDOW: tl.constexpr):
    """Whether the token at `position` attends to `key`, both counted from `first_position`: causal,
    and `window` keys at most, or its chunk's.

    With a window that is one comparison, 0 <= position - key < window: a negative difference is
    large without its sign. The bound `position - window` would take registers of its own.
    """
    if WINDOW == 1:
        return (position - key).to(tl.uint32) < window.to(tl.uint32)
    elif WINDOW == 2:
        reach = (position + first_position) % window + 1
        return (position - key).to(tl.uint32) < reach.to(tl.uint32)
    else:
        return key <= position


@triton.jit
def first_seen(position, first_position, window, WINDOW: tl.constexpr):
    """The first key that the token at `position` attends to, if there is a window or a chunk."""
    if WINDOW == 2:
        first = (position + first_position) // window * window - first_position
    else:
        first = position - window + 1
    return tl.maximum(first, 0)


@triton.jit
def tail_begin(
    position, first_position, exact_ptr, sequence, tail_start, tail_newest,
    TAIL_TOKENS: tl.constexpr,
):  # fmt: skip
    """The first key that the tokens of a sequence at `position` read in their tails, counted like
    these from `first_position` (`cache/layout.py`)."""
    packed = position + first_position - tail_start + 1 - tail_newest
    begin = tail_start + tl.maximum(packed, 0) // TAIL_TOKENS * TAIL_TOKENS
    exact = tl.load(exact_ptr + sequence).to(tl.int32)
    return tl.maximum(begin, exact) - first_position


PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def row_of(i, start, head, N_KV_HEADS: tl.constexpr, GROUP: tl.constexpr):
    """The number among q's [tokens * heads] rows of query `i` in a sequence from `start` on."""
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
    """The first row of a tile, key `at`'s, in the planes that `in_page` gives."""
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
