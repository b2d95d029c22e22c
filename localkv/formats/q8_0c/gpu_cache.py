"""q8_0c: signed bytes and scales by channel; planes d, qs."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.channel_groups import (
    load_channels,
    store_channels,
    symmetric_groups,
    words_of_runs,
)
from localkv.formats.gpu.planes import halves, load_rows, store_rows
from localkv.triton_primitives.fence import fence
from localkv.triton_primitives.unpack import unpack_signed_bytes

PRODUCT = "fp16"
columns = halves


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    half: tl.constexpr = WIDTH // 2
    rows: tl.constexpr = valid.shape[0]
    a = unpack_signed_bytes(load_rows(planes[1], first_row, rows, 0, half, HEAD_DIM), PTX)
    b = unpack_signed_bytes(load_rows(planes[1], first_row, rows, half, half, HEAD_DIM), PTX)
    words = words_of_runs(WIDTH // 8, 8)
    d_a = load_channels(planes[0], first_row, valid, words, HEAD_DIM, WIDTH)
    words += WIDTH // 8
    d_b = load_channels(planes[0], first_row, valid, words, HEAD_DIM, WIDTH)
    return fence(a * d_a, PTX), fence(b * d_b, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, codes = symmetric_groups(x, 127)
    store_channels(planes[0], rows, valid, d, HEAD_DIM)
    store_rows(planes[1], rows, valid, codes.to(tl.uint8), HEAD_DIM)
