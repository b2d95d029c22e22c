"""Products with many tokens: a matrix is decoded to fp16 once, and torch multiplies it.

A tile of a packed product is decoded once for each tile of tokens. With many tokens that costs more
than it costs to write the matrix out as fp16 and to read it again, and cuBLAS multiplies fp16
matrices at some 80 % of what the tensor cores can do. Operands and sums have the precision that
`tile.py` gives them: fp16 weights and activations with their powers of two, float32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.kernels.gpu.footprint import DECODED_BYTES, MANY_TOKENS
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.products.activations import Activations
from localkv.kernels.gpu.products.plane_tensor import PlaneTensor
from localkv.kernels.gpu.products.tile import half_values, part_columns
from localkv.kernels.gpu.products.tile_sizes import gpu_of

ROWS, VALUES = 4, 1024
"""The tile that a warp decodes."""
COLUMNS = 1024
"""Outputs that a program finishes."""


def decodes(n_tokens: int, weights: Sequence[PlaneTensor]) -> bool:
    """Whether these products are made here."""
    return n_tokens >= MANY_TOKENS and not any(weight.layout.is_exact for weight in weights)


@triton.jit
def decode_weight_kernel(
    planes, out_ptr, first_row, n_rows, n_in, w_scale,
    READ: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of rows, tiles of a row). `out_ptr` is fp16 [n_rows, n_in], from `first_row`."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = first_row + tl.minimum(at, n_rows - 1)
    row = row.to(tl.int64) if WIDE else row
    first = tl.program_id(1) * VALUES
    parts = READ(planes, row, first, n_in, VALUES, EVEN, PTX)
    for p in tl.static_range(len(parts)):
        w = half_values(parts[p], w_scale).to(tl.float16)
        column = part_columns(first, p, len(parts), UNIT, VALUES // UNIT)
        ok = (at < n_rows)[:, None, None] & (column < n_in)[None, :, :]
        tl.store(out_ptr + (at.to(tl.int64) * n_in)[:, None, None] + column[None, :, :], w, mask=ok)


def decoded_rows(weight: PlaneTensor, first: int, n_rows: int, out: Tensor) -> Tensor:
    """fp16 [n_rows, n_in]: rows of a matrix from `first` on, times its scale, in `out`."""
    n_in = weight.shape[-1]
    unit = weight.layout.unit
    values = max(unit, min(VALUES, int(triton.next_power_of_2(n_in))))
    rows = out[: n_rows * n_in].view(n_rows, n_in)
    launch(
        decode_weight_kernel,
        (triton.cdiv(n_rows, ROWS), triton.cdiv(n_in, values)),
        weight.operands,
        rows,
        first,
        n_rows,
        n_in,
        weight.scale,
        READ=weight.layout.read,
        UNIT=unit,
        ROWS=ROWS,
        VALUES=values,
        EVEN=n_in % values == 0,
        WIDE=weight.needs_wide_index,
        PTX=gpu_of(rows.device).ptx,
        num_warps=1,
    )
    return rows


def multiplied(x: Tensor, rows: Tensor) -> Tensor:
    """float32 [tokens, rows] of fp16 x [tokens, n] and rows [rows, n]."""
    if x.device.type == "cuda":
        return torch.mm(x, rows.T, out_dtype=torch.float32)
    return x.float() @ rows.float().T


@triton.jit(do_not_specialize=["n"])
def finish_kernel(
    a_ptr, b_ptr, restore_ptr, a_bias_ptr, b_bias_ptr, residual_ptr, out_ptr, numbers,
    a_scale, b_scale, n, n_out,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, tiles of columns). Sums [tokens, n] become outputs, which lie `n_out` apart.

    GATED(a, b) of two sums, or ACTIVATION(a, `numbers`) and the residual of one, if there are any.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ok = column < n
    restore = 1.0 if restore_ptr is None else tl.load(restore_ptr + token)
    y = tl.load(a_ptr + token * n + column, mask=ok, other=0.0) * (1.0 / a_scale) * restore
    if a_bias_ptr is not None:
        y += tl.load(a_bias_ptr + column, mask=ok, other=0.0)
    if GATED is not None:
        up = tl.load(b_ptr + token * n + column, mask=ok, other=0.0) * (1.0 / b_scale) * restore
        if b_bias_ptr is not None:
            up += tl.load(b_bias_ptr + column, mask=ok, other=0.0)
        y = GATED(y, up)
    if ACTIVATION is not None:
        y = ACTIVATION(y, numbers)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + token * n_out + column, mask=ok, other=0.0)
    tl.store(out_ptr + token * n_out + column, y, mask=ok)


def decoded_product(
    x: Activations,
    weights: Sequence[PlaneTensor],
    biases: Sequence[Tensor | None],
    *,
    residual: Tensor | None = None,
    activation: Any = None,
    numbers: tuple[float, ...] = (),
    gated: Any = None,
) -> Tensor:
    """float32 [tokens, n_out]: one matrix's product with `x`, or two that `gated` joins.

    Args:
        biases: float32 [n_out] or None, for each matrix.
        residual: float32 [tokens, n_out], added last.
        activation, numbers: of one matrix's product: a function of `epilogues.PLAIN`.
        gated: of two: one of `epilogues.GATED`.
    """
    n_tokens, n_in = x.values.shape
    n_out = weights[0].shape[0]
    out = x.values.new_empty(n_tokens, n_out, dtype=torch.float32)
    step = max(1, min(n_out, DECODED_BYTES // (2 * n_in)))
    scratch = torch.empty(step * n_in, dtype=torch.float16, device=out.device)
    for first in range(0, n_out, step):
        n = min(step, n_out - first)
        sums = [multiplied(x.values, decoded_rows(w, first, n, scratch)) for w in weights]
        a_bias, *b_bias = (None if b is None else b[first : first + n] for b in biases)
        launch(
            finish_kernel,
            (n_tokens, triton.cdiv(n, COLUMNS)),
            sums[0],
            sums[-1],
            x.restore,
            a_bias,
            b_bias[0] if b_bias else None,
            None if residual is None else residual[:, first:],
            out[:, first:],
            numbers,
            weights[0].scale,
            weights[-1].scale,
            n,
            n_out,
            ACTIVATION=activation,
            GATED=gated,
            COLUMNS=COLUMNS,
        )
    return out
