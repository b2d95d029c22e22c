"""Scales and minima of channels for 32 or 128 tokens (`shared/channel_groups.py`), in kernels.

Tiles of as many keys and more are whole groups, smaller ones are part of one. Scales are loaded as
words of four, as few as there are: a number for every thread would be less than what is copied to
shared memory in the background.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.quant_formats.shared.channel_groups import BELOW_HALF as LESS_THAN_HALF
from localkv.quant_formats.shared.channel_groups import LARGEST as LARGEST_STORED
from localkv.quant_formats.shared.channel_groups import MANY_TOKENS as MANY
from localkv.quant_formats.shared.channel_groups import TOKENS as FEW
from localkv.quant_formats.shared.gpu.rows import F32_LARGEST, NAN, as_f16, limited, truncated

TOKENS, MANY_TOKENS = tl.constexpr(FEW), tl.constexpr(MANY)
LARGEST = tl.constexpr(LARGEST_STORED)
BELOW_HALF = tl.constexpr(LESS_THAN_HALF)


@triton.jit
def words_of_runs(n_words, RUN: tl.constexpr):
    """Words of the first RUN of each 8 words, n_words of them: of 4 * RUN channels of a block."""
    w = tl.arange(0, n_words)
    return w // RUN * 8 + w % RUN


@triton.jit
def load_channels(
    plane, first_row, valid, words,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr = TOKENS,
):  # fmt: skip
    """fp16 [rows, channels]: of each row of a tile the numbers of four channels a word, for groups
    of GROUP tokens; 0 where rows aren't `valid`. Those that encoders store need no limit: what they
    decode to is finite."""
    rows: tl.constexpr = valid.shape[0]
    groups: tl.constexpr = max(1, rows // GROUP)
    shared: tl.constexpr = rows // groups
    n: tl.constexpr = 4 * words.shape[0]
    length: tl.constexpr = HEAD_DIM // 4
    g = tl.arange(0, groups)
    written = tl.max(tl.reshape(valid.to(tl.int32), (groups, shared)), 1) > 0
    pointers = plane.to(tl.pointer_type(tl.int64)) + first_row // GROUP * length
    pointers += g[:, None] * length + words[None, :]
    mask = written[:, None]
    if HEAD_DIM != WIDTH:
        mask = mask & (words < length)[None, :]
    word = tl.load(pointers, mask=mask, other=0)
    shifts = (16 * tl.arange(0, 4)).to(tl.int64)
    bits = (word[:, :, None] >> shifts[None, None, :]).to(tl.uint16)
    scales = tl.reshape(bits.to(tl.float16, bitcast=True), (groups, n))
    spread = tl.broadcast_to(scales[:, None, :], (groups, shared, n))
    return tl.reshape(spread, (rows, n))


@triton.jit
def stored(x):
    """What fp16 makes of fp32 numbers, and as fp32 again."""
    halves = x.to(tl.float16)
    return halves, halves.to(tl.float32)


@triton.jit
def factor_of(d):
    """1 / d of scales as they are stored, 0 where that isn't finite."""
    inverse = tl.div_rn(1.0, d)
    return tl.where(tl.abs(inverse) <= F32_LARGEST, inverse, 0.0)


@triton.jit
def affine_groups(x, BITS: tl.constexpr):
    """One group, fp32 [tokens, WIDTH] -> d, m fp16 [WIDTH], int32 codes [tokens, WIDTH]."""
    last: tl.constexpr = (1 << BITS) - 1
    is_nan = x != x
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    finite = limited(tl.where(is_nan, 0.0, x), LARGEST)
    m, least = stored(tl.where(has_nan, NAN, tl.min(finite, 0)))
    d = tl.div_rn(tl.maximum(tl.max(finite, 0), least) - least, last * 1.0)
    d, scale = stored(tl.where(has_nan, NAN, d))
    codes = truncated((x - least[None, :]) * factor_of(scale)[None, :] + 0.5, 0, last)
    return d, m, codes


@triton.jit
def symmetric_groups(x, LAST: tl.constexpr):
    """One group, fp32 [TOKENS, WIDTH] -> d fp16 [WIDTH], int32 codes from -LAST to LAST."""
    is_nan = x != x
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    largest = tl.max(limited(tl.where(is_nan, 0.0, tl.abs(x)), LARGEST), 0)
    d = tl.div_rn(largest, LAST * 1.0)
    d, scale = stored(tl.where(has_nan, NAN, d))
    y = x * factor_of(scale)[None, :]
    y += tl.where(y < 0, -BELOW_HALF, BELOW_HALF)
    return d, truncated(y, -LAST, LAST)


@triton.jit
def store_channels(plane, rows, valid, x, HEAD_DIM: tl.constexpr):
    """x fp16 [WIDTH], a number for each channel of the group that `rows` [tokens] are."""
    j = tl.arange(0, x.shape[0])
    first = tl.min(rows, 0) // rows.shape[0] * HEAD_DIM
    exists = (tl.max(valid.to(tl.int32), 0) > 0) & (j < HEAD_DIM)
    tl.store(as_f16(plane) + first + j, x, mask=exists)
