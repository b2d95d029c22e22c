"""RMSNorm and LayerNorm, as fp32 or ready for tensor cores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.kernels.bounds import check_array
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.products.activations import Activations, row_warps, scale_to_fp16
from localkv.kernels.layer_weights import Norm

TILE = 2048
"""Values that a program takes at least."""


@triton.jit(do_not_specialize=["n_rows"])
def norm_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, restore_ptr, n_rows, n, eps, factor,
    ROWS: tl.constexpr, N: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """`restore_ptr` is None where `out_ptr` is to be fp32, `bias_ptr` where there is none.

    CENTRED takes the mean of each row off first. Unless `residual_ptr` is None, its fp32 rows are
    added to `factor` times the norm.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, N)
    ok = (row < n_rows)[:, None] & (column < n)[None, :]
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    x = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < n, other=0.0)
    if CENTRED:
        x = tl.where(column[None, :] < n, x - (tl.sum(x, 1) / n)[:, None], 0.0)
    square = tl.sum(x * x, 1) / n
    y = x * tl.rsqrt(square + eps)[:, None] * weight[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < n, other=0.0)[None, :]
    if residual_ptr is not None:
        y = tl.load(residual_ptr + at, mask=ok, other=0.0) + factor * y
    if restore_ptr is None:
        tl.store(out_ptr + at, y, mask=ok)
    else:
        values, restore = scale_to_fp16(y)
        tl.store(out_ptr + at, values, mask=ok)
        tl.store(restore_ptr + row, restore, mask=row < n_rows)


def _launch(
    x: Tensor,
    norm: Norm,
    out: Tensor,
    restore: Tensor | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    n = x.shape[-1]
    for weight in (norm.weight, norm.bias):
        if weight is not None:
            check_array("a norm's weight", weight, "float32", n)
    n_rows = x.numel() // n
    width = triton.next_power_of_2(n)
    rows = max(1, TILE // width)
    launch(
        norm_kernel,
        (triton.cdiv(n_rows, rows),),
        x, norm.weight, norm.bias, residual, out, restore, n_rows, n, norm.spec.eps, factor,
        ROWS=rows, N=width, CENTRED=norm.spec.kind == "layer", num_warps=row_warps(width * rows),
    )  # fmt: skip


def norm(x: Tensor, norm: Norm) -> Tensor:
    """Norm rows of float32 or float16 `x` [..., n]; float32 of the same shape."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.float32)
    _launch(x, norm, out)
    return out


def added_norm(residual: Tensor, x: Tensor, norm: Norm, factor: float = 1.0) -> Tensor:
    """residual + factor * norm(x), of float32 rows; float32."""
    x, residual = x.contiguous(), residual.contiguous()
    check_array("a residual", residual, "float32", *x.shape)
    out = torch.empty_like(residual)
    _launch(x, norm, out, residual=residual, factor=factor)
    return out


def norm_packed(x: Tensor, norm: Norm) -> Activations:
    """Norm x [tokens, n] into fp16 rows with their factors."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.float16)
    restore = x.new_empty(x.shape[0], dtype=torch.float32)
    _launch(x, norm, out, restore)
    return Activations(out, restore)
