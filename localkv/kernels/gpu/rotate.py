"""Rotation of queries and of attention's output: `kernels/reference/hadamard.py` in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localkv.kernels.gpu.hadamard import hadamard
from localkv.kernels.gpu.launch import launch

ROWS = 8
"""Rows of a program."""


@triton.jit(do_not_specialize=["n_rows"])
def rotate_kernel(
    x_ptr,
    out_ptr,
    n_rows,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    """x, out: fp32 [n_rows, HEAD_DIM]; BLOCK divides HEAD_DIM, and WIDTH is the power of two above.

    Grid (blocks of N rows).
    """
    row = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    channel = tl.arange(0, WIDTH)
    at = row[:, None] * HEAD_DIM + channel[None, :]
    mask = (row < n_rows)[:, None] & (channel < HEAD_DIM)[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, hadamard(x, BLOCK), mask=mask)


def rotate_gpu(x: Tensor, block: int) -> Tensor:
    """`hadamard_transform` of x [tokens, heads, head_dim] on a GPU; a block of 0 leaves it."""
    if block == 0:
        return x
    x = x.contiguous()
    n_rows, head_dim = x.shape[0] * x.shape[1], x.shape[2]
    out = x.new_empty(x.shape)
    launch(
        rotate_kernel,
        (triton.cdiv(n_rows, ROWS),),
        x,
        out,
        n_rows,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        BLOCK=block,
        N=ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
