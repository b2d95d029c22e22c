"""Rows of queries on their way into the CPU's attention workers, and of outputs on their way out.

A row is one new token and one query head of the KV head at hand.

Codes of K that are integers are multiplied with q as integers (`simd/quads.py`). A block of 32
values of q gets a scale, and integers of two signed digits of base 256:

    scale = largest / LARGEST_INTEGER        largest: of the block's magnitudes
    n     = round(value * (1 / scale))       |n| <= 0x7F70; up to 0x7F7F two digits do

The reciprocal and the product are rounded to floats, by 2^-24 of at most 2^15 each, and the integer
by a half. So n is off by less than 0.504, which is ERROR_BOUND = 0.504 / 0x7F70 < 2^-15.9 of the
block's largest magnitude. The codes themselves are off by up to a half of 127, of the finest type.

The digits come from the bytes of n + 128, as adding that leaves no carry between them. Byte 1 is
the higher digit, and byte 0 with its top bit flipped is the lower one.

Codes are `offset` larger than what they stand for (8 for q4_0), so offset * sum n has to be taken
off: the sums of products start with minus that.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.jobs import (
    OF_HEAD,
    OF_PAGE,
    PLANE,
    SOFTCAP,
    SOFTMAX_SCALE,
    Block,
    Chunk,
    Job,
    Sequence,
)
from localkv.kernels.cpu.attention.sizes import part_result
from localkv.kernels.cpu.attention.softmax import (
    ONE,
    ZERO,
    fade,
    log_sum_exp,
    power_of_two,
    query_factor,
)
from localkv.kernels.cpu.attention.softmax import START as NOTHING_SEEN
from localkv.simd import LANES
from localkv.simd.arithmetic import (
    absolute,
    add,
    f32x16,
    fma,
    i32x16,
    max_lanes,
    maximum,
    mul,
    nearest_i32,
    sum_lanes,
    sum_lanes_i32,
    zero_f32,
    zero_i32,
)
from localkv.simd.integer import add_i32, shift_right, xor_i32
from localkv.simd.kinds import Address, Addresses, Count, Float
from localkv.simd.memory import (
    get_f32,
    get_i64,
    load_f32,
    put_f32,
    put_i32,
    reader,
    store_f32,
    store_low_bytes,
)
from localkv.simd.quads import BLOCK_DIGITS, DIGITS

CODEBOOK = 5
"""Where a table of planes has the codebook, the same for all pages."""


part_result = njit(part_result)
read_sequence, read_chunk, read_block = reader(Sequence), reader(Chunk), reader(Block)


@njit
def first_visible(job: Job, token: int) -> int:
    """The first row of the segment that a token sees."""
    return get_i64(job.visible, token * 2)


@njit
def end_visible(job: Job, token: int) -> int:
    """The row after the last one that a token sees."""
    return get_i64(job.visible, token * 2 + 1)


@njit
def rows_seen(job: Job, sequence: Sequence, page: int) -> tuple[int, int]:
    """The rows of one of its pages that a sequence's new tokens see, from one on at which kernels
    can begin.

    What a token sees begins and ends no earlier than what the one before sees.
    """
    row = page * PAGE_TOKENS
    first = first_visible(job, sequence.token) - row
    end = end_visible(job, sequence.token + sequence.n_new - 1)
    end = min(end, sequence.length) - row
    return max(0, first) // job.rows_apart * job.rows_apart, min(PAGE_TOKENS, end)


@njit
def region(planes: Address, plane: int, place: tuple[int, int], row: int) -> Address:
    """The address of a page and KV head in one plane, from a row on: a multiple of the tokens that
    lie together."""
    page, head = place
    n_bytes = get_i64(planes, plane * PLANE + OF_HEAD)
    first = get_i64(planes, plane * PLANE) + page * get_i64(planes, plane * PLANE + OF_PAGE)
    return first + head * n_bytes + n_bytes * row // PAGE_TOKENS


@njit
def regions(planes: Address, place: tuple[int, int], row: int) -> Addresses:
    """`region` in each of four planes, and the codebook."""
    return (
        region(planes, 0, place, row),
        region(planes, 1, place, row),
        region(planes, 2, place, row),
        region(planes, 3, place, row),
        region(planes, CODEBOOK, place, row),
    )


LARGEST_INTEGER = np.float32(0x7F70)
"""A little less than the largest integer whose two digits of base 256 are signed bytes, so that
no rounding exceeds that."""
ERROR_BOUND = 0.504 / 0x7F70
"""By how much of its block's largest magnitude a value is off at most, once it is an integer."""
SMALLEST = np.float32(2.0**-100)
START, SCALE = DIGITS * BLOCK_DIGITS, DIGITS * BLOCK_DIGITS + 1
"""Words of a digit block."""


@njit
def softcap_of(address: Address) -> Float:
    """The soft cap of the job at an address."""
    return get_f32(address, SOFTCAP * 2)


@njit
def row_index(job: Job, token: int, head: int, row: int) -> int:
    """The number among q's [tokens * n_heads] rows of row `row` of a token and a KV head."""
    return ((token + row // job.group) * job.n_kv_heads + head) * job.group + row % job.group


@njit
def add_distances(job: Job, logits: Address, n: int, head: int, row: int, first_row: int) -> None:
    """Add ALiBi to `n` logits (a multiple of 16) of row `row` of q, of a KV head, from `first_row`
    of the segment on. The last row that the token sees is its own."""
    slope = f32x16(get_f32(job.slopes, head * job.group + row % job.group))
    own = end_visible(job, row // job.group) - 1
    offset = f32x16(np.float32(first_row - own))
    for t in range(0, n, LANES):
        distance = add(load_f32(job.ramp, t), offset)
        store_f32(logits, t, fma(distance, slope, load_f32(logits, t)))


@njit
def gather_queries(
    address: Address,
    job: Job,
    q: Address,
    token: int,
    head: int,
    first: int,
    n_rows: int,
    n_padded: int,
) -> None:
    """q [n_padded, head_dim]: `n_rows` scaled rows from row `first` on, zeros after them."""
    factor = f32x16(query_factor(get_f32(address, SOFTMAX_SCALE * 2), softcap_of(address)))
    for row in range(n_padded):
        source = row_index(job, token, head, first + row) * job.head_dim
        for c in range(0, job.head_dim, LANES):
            x = zero_f32()
            if row < n_rows:
                x = mul(load_f32(job.q, source + c), factor)
            store_f32(q, row * job.head_dim + c, x)


@njit(error_model="numpy")
def split_queries(q: Address, n_blocks: int, offset: Count) -> None:
    """Turn blocks of 32 floats into digit blocks (see `simd/quads.py`), where they are.

    Sums start with a correction for codes stored `offset` too high. A block's integers go up to its
    largest magnitude, or to SMALLEST if that is less; the scale of a block that isn't finite is
    NaN.
    """
    for i in range(n_blocks):
        block = q + i * 128
        low, high = load_f32(block, 0), load_f32(block, 16)
        largest = max_lanes(maximum(absolute(low), absolute(high)))
        not_finite = sum_lanes(add(mul(low, zero_f32()), mul(high, zero_f32())))  # 0 or NaN
        scale = max(largest, SMALLEST) / LARGEST_INTEGER
        factor = f32x16(ONE / scale)
        sums = zero_i32()
        for half in range(2):
            n = nearest_i32(mul(high if half else low, factor))
            sums = add_i32(sums, n)
            n = add_i32(n, i32x16(np.int32(128)))
            store_low_bytes(block, half * 16, shift_right(n, i32x16(np.int32(8))))
            store_low_bytes(block, 32 + half * 16, xor_i32(n, i32x16(np.int32(128))))
        put_i32(block, START, -offset * sum_lanes_i32(sums))
        put_f32(block, SCALE, scale + not_finite)


@njit
def put_output(job: Job, at: int, row: Address, reference: Float, total: Float) -> None:
    """Output and log-sum-exp of row `at` of q: 0 and minus infinity if it saw nothing, NaN if a
    logit was NaN."""
    factor = ZERO
    if total != ZERO:
        factor = ONE / total
    for c in range(0, job.head_dim, LANES):
        store_f32(job.out, at * job.head_dim + c, mul(load_f32(row, c), f32x16(factor)))
    put_f32(job.lse, at, log_sum_exp(reference, total))


@njit
def merge_parts(job: Job, sequence: Sequence, head: int, parts: Address, stride: int) -> None:
    """The outputs and log-sum-exps of a sequence and KV head from parts `stride` floats apart."""
    head_dim, result = job.head_dim, part_result(job.n_rows, job.head_dim)
    for row in range(sequence.n_new * job.group):
        top = NOTHING_SEEN
        for i in range(sequence.n_parts):
            top = max(top, get_f32(parts, i * stride + result.references + row))
        merged = parts + row * head_dim * 4
        total = ZERO
        for i in range(sequence.n_parts):
            weight = power_of_two(get_f32(parts, i * stride + result.references + row) - top)
            total += weight * get_f32(parts, i * stride + result.totals + row)
            if i == 0:
                fade(merged, head_dim, weight)
                continue
            for c in range(0, head_dim, LANES):
                part = mul(load_f32(merged, i * stride + c), f32x16(weight))
                store_f32(merged, c, add(load_f32(merged, c), part))
        put_output(job, row_index(job, sequence.token, head, row), merged, top, total)
