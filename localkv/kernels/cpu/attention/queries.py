"""Rows of queries on their way into the CPU's attention workers, and of outputs on their way out.

A row is one new token and one query head of the KV head at hand.

Codes of K that are integers are multiplied with q as integers (`simd/quads.py`). A block of 32
values of q gets a scale, and integers of three signed digits of base 256:

    scale = largest / LARGEST_INTEGER        largest: of the block's magnitudes
    n     = round(value * (1 / scale))       |n| <= 0x7F7F70; up to 0x7F7F7F three digits do

The reciprocal and the product are rounded to floats, by 2^-24 of at most 2^23 each, and the integer
by a half. So n is off by less than 1.5, which is ERROR_BOUND = 1.5 / 0x7F7F70 < 2^-22.4 of the
block's largest magnitude; a float near the largest is itself only known to 2^-24.

The digits come from the bytes of n + 0x808080: adding 128 to each digit makes all of them unsigned,
with no carries left between them, so byte i is digit i + 128, and flipping its top bit makes the
signed digit.

Codes are `offset` larger than what they stand for (8 for q4_0), so offset * sum n has to be taken
off: the sums of products start with minus that, in the two parts that they are kept in.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from localkv.kernels.cpu.attention.job import SOFTCAP, SOFTMAX_SCALE, Job
from localkv.kernels.cpu.attention.softmax import ONE, ZERO, log_sum_exp, query_factor
from localkv.simd.arithmetic import (
    absolute,
    add,
    f32x16,
    i32x16,
    max_lanes,
    maximum,
    mul,
    nearest,
    sum_lanes,
    sum_lanes_i32,
    to_i32,
    zero_f32,
    zero_i32,
)
from localkv.simd.integer import add_i32, and_i32, shift_right, xor_i32
from localkv.simd.kinds import Address, Count, Float
from localkv.simd.lanes import LANES
from localkv.simd.memory import (
    get_f32,
    load_f32,
    put_f32,
    put_i32,
    store_f32,
    store_low_bytes,
)
from localkv.simd.quads import DIGITS, SCALE, STARTS

LARGEST_INTEGER = np.float32(0x7F7F70)
"""A little less than the largest integer whose three digits of base 256 are signed bytes, so that
no rounding exceeds that."""
ERROR_BOUND = 1.5 / 0x7F7F70
"""By how much of its block's largest magnitude a value is off at most, once it is an integer."""
SMALLEST = np.float32(2.0**-100)
EVERY_128 = np.int32(0x808080)


@njit
def softcap_of(address: Address) -> Float:
    """The soft cap of the job at an address."""
    return get_f32(address, SOFTCAP * 2)


@njit
def row_index(job: Job, token: int, head: int, row: int) -> int:
    """Which of q's [tokens * n_heads] rows is row `row`, counted from a token and a KV head."""
    return ((token + row // job.group) * job.n_kv_heads + head) * job.group + row % job.group


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
        high_sums, low_sums = zero_i32(), zero_i32()
        for half in range(2):
            x = high if half else low
            # every byte is 128 more than the signed digit
            x = add_i32(to_i32(nearest(mul(x, factor))), i32x16(EVERY_128))
            for digit in range(DIGITS):
                byte = shift_right(x, i32x16(np.int32(16 - 8 * digit)))
                store_low_bytes(block, digit * 32 + half * 16, xor_i32(byte, i32x16(np.int32(128))))
            high_sums = add_i32(high_sums, shift_right(x, i32x16(np.int32(8))))
            low_sums = add_i32(low_sums, and_i32(x, i32x16(np.int32(255))))
        put_i32(block, STARTS, offset * (32 * 0x8080 - sum_lanes_i32(high_sums)))
        put_i32(block, STARTS + 1, offset * (32 * 0x80 - sum_lanes_i32(low_sums)))
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
