"""Common parts of types with codes of two and three bits: words of `qs`, a third bit in `qh`.

A byte of `qs` has four codes, from the lowest bit on i, i + 16, i + 8 and i + 24, so a word has
eight of the low half of a tile and eight of the high one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.quant_formats.shared.gpu.rows import as_i32, load_rows, two_halves
from localkv.triton_primitives.unpack import unpack_three_bits, unpack_two_bits


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
    """Which of four columns each is, int32 [1, WIDTH / 2]."""
    return (tl.arange(0, WIDTH // 2) % 4)[None, :]


@triton.jit
def quarter_columns(WIDTH: tl.constexpr):
    """Channels of the two halves of a tile of codes of two and three bits: of a byte's codes the
    first and the third, then the second and the fourth."""
    j = tl.arange(0, WIDTH // 2)
    byte = j % (WIDTH // 4)
    low = byte // 8 * 32 + byte % 8 + j // (WIDTH // 4) * 8
    return low, low + 16


@triton.jit
def one_after_the_other(a, b):
    """[rows, n] twice -> [rows, 2 n]."""
    pairs = tl.permute(tl.join(a, b), (0, 2, 1))
    return tl.reshape(pairs, (a.shape[0], 2 * a.shape[1]))


@triton.jit
def load_two_bits(
    qs_plane,
    first_row,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    OFFSET: tl.constexpr,
    PTX: tl.constexpr,
):
    """STEP (1 or 2) times the four codes of each byte, from the lowest bit on, less OFFSET: fp16
    [ROWS, WIDTH / 4] each."""
    qs = load_rows(qs_plane, first_row, ROWS, 0, WIDTH // 4, HEAD_DIM // 4)
    return unpack_two_bits(qs, STEP, OFFSET, PTX)


@triton.jit
def load_three_bits(
    qs_plane,
    qh_plane,
    first_row,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    PTX: tl.constexpr,
):
    """Codes with a third bit, as `load_two_bits` loads two."""
    qs = load_rows(qs_plane, first_row, ROWS, 0, WIDTH // 4, HEAD_DIM // 4)
    thirds, lane = load_third_bits(qh_plane, first_row, ROWS, HEAD_DIM, WIDTH)
    return unpack_three_bits(qs, thirds, lane, OFFSET, PTX)


@triton.jit
def swap_bits(x, DISTANCE: tl.constexpr, LOWER: tl.constexpr):
    """int32 x with the bits LOWER exchanged with the bits DISTANCE places above."""
    changed = (x ^ (x >> DISTANCE)) & LOWER
    return x ^ changed ^ (changed << DISTANCE)


@triton.jit
def beside_two_bits(qh):
    """Bits of 32 codes, in their order, int32 -> twice as many as the words of `qs` have codes:
    a code's bit is in the lower place of its two bits there for the first word, in the upper one
    for the second.

    A bit's place has five bits itself: two say which code of a byte it is, one which word, two
    which byte of it. Each step exchanges two of them.
    """
    x = swap_bits(qh, 14, 0x0000CCCC)
    x = swap_bits(x, 7, 0x00AA00AA)
    return swap_bits(x, 3, 0x0A0A0A0A)


@triton.jit
def load_third_bits(
    qh_plane, first_row, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Third bits and lanes of bytes of codes as `unpack_three_bits` takes them."""
    blocks: tl.constexpr = WIDTH // 32
    qh = load_rows(as_i32(qh_plane), first_row, ROWS, 0, blocks, HEAD_DIM // 32)
    thirds = beside_two_bits(qh)[:, :, None] >> tl.arange(0, 2)[None, None, :]
    thirds = tl.broadcast_to((thirds & 0x55555555)[:, :, :, None], (ROWS, blocks, 2, 4))
    lane = (tl.arange(0, WIDTH // 4) % 4)[None, :]
    return tl.reshape(thirds, (ROWS, WIDTH // 4)), lane


@triton.jit
def pack_two_bits(codes):
    """The low two bits of codes: [rows, blocks, 32] -> uint8 [rows, bytes]."""
    low, high = two_halves(codes & 3)
    low, high = two_halves(low | (high << 2))
    return tl.reshape(low | (high << 4), (codes.shape[0], codes.shape[1] * 8)).to(tl.uint8)


@triton.jit
def pack_third_bits(codes):
    """Bit 2 of code i as bit i: [rows, blocks, 32] -> int32 [rows, blocks]."""
    return tl.sum(((codes >> 2) & 1) << tl.arange(0, 32)[None, None, :], 2)
