"""q4_1c: nibbles, scales and minima by channel; planes d, m, qs."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.channel_groups import (
    affine_groups,
    load_channels,
    store_channels,
    words_of_runs,
)
from localkv.formats.gpu.planes import load_rows, nibble_columns, store_rows
from localkv.formats.gpu.rounding import in_blocks, pack_nibbles
from localkv.triton_primitives.fence import fence
from localkv.triton_primitives.unpack import unpack_nibbles

PRODUCT = "fp16"
columns = nibble_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[2], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    low, high = unpack_nibbles(qs, 0, PTX)
    words = words_of_runs(WIDTH // 8, 4)
    d = load_channels(planes[0], first_row, valid, words, HEAD_DIM, WIDTH)
    m = load_channels(planes[1], first_row, valid, words, HEAD_DIM, WIDTH)
    low = low * d + m
    words += 4
    d = load_channels(planes[0], first_row, valid, words, HEAD_DIM, WIDTH)
    m = load_channels(planes[1], first_row, valid, words, HEAD_DIM, WIDTH)
    return fence(low, PTX), fence(high * d + m, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_groups(x, 4)
    store_channels(planes[0], rows, valid, d, HEAD_DIM)
    store_channels(planes[1], rows, valid, m, HEAD_DIM)
    store_rows(planes[2], rows, valid, pack_nibbles(in_blocks(codes)), HEAD_DIM // 2)
