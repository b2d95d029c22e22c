"""The gate of attention's output, read where the projection of q left it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.launch_bounds import check_rows

ROWS = 8
"""Heads of a program."""


@triton.jit(do_not_specialize=["n_rows"])
def gate_kernel(
    x_ptr, gate_ptr, out_ptr, n_rows,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x * sigmoid(gate), fp32 [n_rows, HEAD_DIM]; heads of the gate are STRIDE apart.

    Grid (blocks of ROWS heads).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    mask = (row < n_rows)[:, None] & (channel < HEAD_DIM)[None, :]
    at = row[:, None] * HEAD_DIM + channel[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + row[:, None] * STRIDE + channel[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + at, x / (1.0 + tl.exp(-gate)), mask=mask)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x [tokens, heads, channels] times the sigmoid of as many values, whose heads may be further
    apart; float32."""
    check_rows(gate, "a gate", *x.shape)
    x = x.contiguous()
    out = x.new_empty(x.shape)
    n_rows, head_dim = x.shape[0] * x.shape[1], x.shape[2]
    launch(
        gate_kernel,
        (triton.cdiv(n_rows, ROWS),),
        x,
        gate,
        out,
        n_rows,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        STRIDE=gate.stride(1),
        ROWS=ROWS,
        num_warps=4,
    )
    return out
