"""RMSNorm, as fp32 or ready for tensor cores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.products.activations import Activations, row_warps, scale_to_fp16

TILE = 2048
"""Values that a program takes at least."""


@triton.jit(do_not_specialize=["n_rows"])
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, restore_ptr, n_rows, n, eps,
    ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`restore_ptr` is None where `out_ptr` is to be fp32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, N)
    ok = (row < n_rows)[:, None] & (column < n)[None, :]
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    x = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < n, other=0.0)
    square = tl.sum(x * x, 1) / n
    y = x * tl.rsqrt(square + eps)[:, None] * weight[None, :]
    if restore_ptr is None:
        tl.store(out_ptr + at, y, mask=ok)
    else:
        values, restore = scale_to_fp16(y)
        tl.store(out_ptr + at, values, mask=ok)
        tl.store(restore_ptr + row, restore, mask=row < n_rows)


def _launch(x: Tensor, weight: Tensor, out: Tensor, restore: Tensor | None, eps: float) -> None:
    n = x.shape[-1]
    n_rows = x.numel() // n
    width = triton.next_power_of_2(n)
    rows = max(1, TILE // width)
    launch(
        rms_norm_kernel,
        (triton.cdiv(n_rows, rows),),
        x, weight, out, restore, n_rows, n, eps,
        ROWS=rows, N=width, num_warps=row_warps(width * rows),
    )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.rms_norm`, for float32 or float16 `x` [..., n]; float32 of the same shape."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.float32)
    _launch(x, weight, out, None, eps)
    return out


def rms_norm_packed(x: Tensor, weight: Tensor, eps: float) -> Activations:
    """The same of x [tokens, n], as fp16 rows with their factors."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.float16)
    restore = x.new_empty(x.shape[0], dtype=torch.float32)
    _launch(x, weight, out, restore, eps)
    return Activations(out, restore)
