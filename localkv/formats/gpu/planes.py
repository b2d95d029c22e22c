"""Loads and stores of rows of a plane, and the order of channels, which types share."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.triton_primitives.saturate import largest_scale, saturate


@triton.jit
def halves(WIDTH: tl.constexpr):
    """Channels of a tile that is cut in the middle."""
    j = tl.arange(0, WIDTH // 2)
    return j, j + WIDTH // 2


@triton.jit
def nibble_columns(WIDTH: tl.constexpr):
    """Channels of the low and of the high nibbles of rows in blocks of 32."""
    j = tl.arange(0, WIDTH // 2)
    low = j // 16 * 32 + j % 16
    return low, low + 16


@triton.jit
def load_rows(plane, first_row, ROWS: tl.constexpr, FIRST, N: tl.constexpr, LENGTH: tl.constexpr):
    """Items FIRST to FIRST + N (a constant) of ROWS rows of LENGTH items: [ROWS, N].

    `plane` is a pointer to items of the type wanted; beyond a row's end are zeros.
    """
    n = tl.arange(0, ROWS)
    j = FIRST + tl.arange(0, N)
    pointers = plane + first_row * LENGTH + (n[:, None] * LENGTH + j[None, :])
    if FIRST + N > LENGTH:
        return tl.load(pointers, mask=(j < LENGTH)[None, :], other=0)
    else:
        return tl.load(pointers)


@triton.jit
def load_valid_rows(plane, first_row, valid, FIRST, N: tl.constexpr, LENGTH: tl.constexpr):
    """As `load_rows`, with zeros in place of rows that aren't `valid` (bool [rows])."""
    n = tl.arange(0, valid.shape[0])
    j = FIRST + tl.arange(0, N)
    pointers = plane + first_row * LENGTH + (n[:, None] * LENGTH + j[None, :])
    mask = valid[:, None]
    if FIRST + N > LENGTH:
        mask = mask & (j < LENGTH)[None, :]
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def load_halves(plane, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of HEAD_DIM items, zeros where not `valid`, as two halves: [rows, WIDTH / 2] each."""
    half: tl.constexpr = WIDTH // 2
    left = load_valid_rows(plane, first_row, valid, 0, half, HEAD_DIM)
    return left, load_valid_rows(plane, first_row, valid, half, half, HEAD_DIM)


@triton.jit
def as_f16(plane):
    """A plane of fp16 numbers."""
    return plane.to(tl.pointer_type(tl.float16))


@triton.jit
def load_scales(
    plane, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr
):
    """A fp16 number per block of 32, 0 in rows that aren't `valid`: [rows, WIDTH / 32].

    Numbers are limited to what times LARGEST is finite in fp16: a block of larger values, which
    the codes can hold, shrinks to fp16's range instead of becoming infinite.

    Loaded as words of 2 or 4 of them where a row has whole words: with more threads than numbers
    each would load 2 bytes, and so little isn't copied to shared memory in the background.
    """
    blocks: tl.constexpr = WIDTH // 32
    if HEAD_DIM == WIDTH:
        rows: tl.constexpr = valid.shape[0]
        per_word: tl.constexpr = 2 if blocks == 2 else 4
        words = plane.to(tl.pointer_type(tl.int32 if blocks == 2 else tl.int64))
        length: tl.constexpr = blocks // per_word
        word = load_valid_rows(words, first_row, valid, 0, length, length)
        shifts = (16 * tl.arange(0, per_word)).to(word.dtype)
        bits = (word[:, :, None] >> shifts[None, None, :]).to(tl.uint16)
        scales = tl.reshape(bits.to(tl.float16, bitcast=True), (rows, blocks))
    else:
        scales = load_valid_rows(as_f16(plane), first_row, valid, 0, blocks, HEAD_DIM // 32)
    return saturate(scales, largest_scale(LARGEST))


@triton.jit
def as_i32(plane):
    """A plane of words."""
    return plane.to(tl.pointer_type(tl.int32))


@triton.jit
def repeat(x, TIMES: tl.constexpr):
    """Each item of x [rows, n] as often one after the other: [rows, n * TIMES]."""
    spread = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], TIMES))
    return tl.reshape(spread, (x.shape[0], x.shape[1] * TIMES))


@triton.jit
def cut(x):
    """The left and the right half of x [rows, n]."""
    pairs = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def store_rows(plane, rows, valid, x, LENGTH: tl.constexpr):
    """The first LENGTH items of x [rows, n], whose type is the plane's."""
    j = tl.arange(0, x.shape[1])
    mask = valid[:, None] & (j < LENGTH)[None, :]
    tl.store(plane + rows[:, None] * LENGTH + j[None, :], x, mask=mask)
