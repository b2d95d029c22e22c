"""Common parts of q5_0 and q5_1: nibbles in one plane, the bit above them in another."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.planes import as_i32, load_rows
from localkv.triton_primitives.unpack import unpack_five_bits


@triton.jit
def load_five_bits(
    qs_plane,
    qh_plane,
    first_row,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    PTX: tl.constexpr,
):
    """Codes less OFFSET of the low and the high nibbles: fp16 [ROWS, WIDTH / 2] each."""
    blocks: tl.constexpr = WIDTH // 32
    qs = load_rows(qs_plane, first_row, ROWS, 0, WIDTH // 2, HEAD_DIM // 2)
    qh = load_rows(as_i32(qh_plane), first_row, ROWS, 0, blocks, HEAD_DIM // 32)
    # the four bits of four bytes in the lowest place, once for each group of four bytes
    above = qh[:, :, None] >> (tl.arange(0, 4) * 4)[None, None, :]
    above = tl.broadcast_to(above[:, :, :, None], (ROWS, blocks, 4, 4))
    above = tl.reshape(above, (ROWS, WIDTH // 2))
    lane = (tl.arange(0, WIDTH // 2) % 4)[None, :]
    return unpack_five_bits(qs, above, lane, OFFSET, PTX)
