"""q6_0: 6-bit codes less 32 and a scale; planes d, qh, qs."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.quant_formats.low_bits.gpu import pack_two_bits
from localkv.quant_formats.shared.gpu.rows import (
    F16_LIMIT,
    as_f16,
    as_i32,
    fitted_scale,
    in_blocks,
    largest_magnitude,
    limited_numbers,
    load_rows,
    load_scales,
    nibble_columns,
    pack_nibbles,
    repeat,
    scale_and_inverse,
    store_rows,
    truncated,
)
from localkv.triton_primitives.unpack import fence, unpack_bit_field_of_words

PRODUCT = "fp16"
columns = nibble_columns


@triton.jit
def load_two_bit_words(
    plane, first_row, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """int32 [ROWS, WIDTH / 2]: words whose bytes hold the codes of four columns in their lowest
    bits, once for each column; codes of the high half are two bits further."""
    blocks: tl.constexpr = WIDTH // 32
    words = load_rows(as_i32(plane), first_row, ROWS, 0, 2 * blocks, HEAD_DIM // 16)
    words = tl.reshape(words, (ROWS, blocks, 1, 2))
    # the high nibbles of a word belong to columns that are 8 further than its low ones'
    words = words >> (tl.arange(0, 2) * 4)[None, None, :, None]
    words = tl.broadcast_to(words[:, :, :, :, None], (ROWS, blocks, 2, 2, 4))
    return tl.reshape(words, (ROWS, WIDTH // 2))


@triton.jit
def lanes(WIDTH: tl.constexpr):
    """The number of each lane among the four of a word, int32 [1, WIDTH / 2]."""
    return (tl.arange(0, WIDTH // 2) % 4)[None, :]


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    qs = load_rows(planes[2], first_row, rows, 0, WIDTH // 2, HEAD_DIM // 2)
    above = load_two_bit_words(planes[1], first_row, rows, HEAD_DIM, WIDTH)
    lane = lanes(WIDTH)
    low = unpack_bit_field_of_words(qs, above, lane, 0, 4, 0, 2, 32, PTX)
    high = unpack_bit_field_of_words(qs, above, lane, 4, 4, 2, 2, 32, PTX)
    d = repeat(load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 32), 16)
    return fence(low * d, PTX), fence(high * d, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    x = limited_numbers(in_blocks(x), 32 * F16_LIMIT)
    extreme, has_nan = largest_magnitude(x)
    d, inverse = scale_and_inverse(extreme, has_nan, -32.0)
    y = x * inverse[:, :, None]
    codes = truncated(y + 32.5, 0, 63)
    q = codes.to(tl.float32) - 32.0
    d = fitted_scale(y * y * x * q, y * y * q * q, d)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(planes[1], rows, valid, pack_two_bits(codes >> 4), HEAD_DIM // 4)
    store_rows(planes[2], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)
