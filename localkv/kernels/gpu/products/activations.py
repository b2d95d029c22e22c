"""Activations as tensor cores want them: fp16, each token times a power of two.

The factor brings a token's largest magnitude to between 2 ** 14 and 2 ** 15. So none overflows,
however large, and a value only becomes less precise than fp16 is if it is 2 ** 28 times smaller
than that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.kernels.gpu.launch import launch
from localkv.triton_primitives.float_bits import F16_MAX, saturate

ROWS = 1
"""Rows of a program that packs them: there are few enough, and each is long."""


@dataclass(frozen=True)
class Activations:
    """Rows that are multiplied with matrices.

    Attributes:
        values: float32 or float16 [tokens, n], contiguous.
        restore: float32 [tokens], the factor of each token's products, or None.
    """

    values: Tensor
    restore: Tensor | None = None


@triton.jit
def scale_to_fp16(x):
    """fp32 [rows, n] -> fp16 [rows, n] and fp32 [rows]: x is the one times the other."""
    exponent = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 64 << 23), 190 << 23)
    factor = ((134 << 23) - exponent + (134 << 23)).to(tl.float32, bitcast=True)
    return (x * factor[:, None]).to(tl.float16), 1.0 / factor


@triton.jit(do_not_specialize=["n_rows"])
def pack_rows_kernel(
    x_ptr, values_ptr, restore_ptr, n_rows, n,
    ROWS: tl.constexpr, N: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, N)
    ok = (row < n_rows)[:, None] & (column < n)[None, :]
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    x = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
    if HALVES:
        tl.store(values_ptr + at, saturate(x, F16_MAX), mask=ok)
    else:
        values, restore = scale_to_fp16(x)
        tl.store(values_ptr + at, values, mask=ok)
        tl.store(restore_ptr + row, restore, mask=row < n_rows)


def pack_rows(x: Tensor, *, halves: bool = False) -> Activations:
    """x float [tokens, n] -> fp16 rows; with `halves` clamped and rounded as they are."""
    x = x.contiguous()
    n_rows, n = x.shape
    values = torch.empty_like(x, dtype=torch.float16)
    restore = None if halves else x.new_empty(n_rows, dtype=torch.float32)
    launch(
        pack_rows_kernel,
        (triton.cdiv(n_rows, ROWS),),
        x, values, restore, n_rows, n,
        ROWS=ROWS, N=triton.next_power_of_2(n), HALVES=halves, num_warps=row_warps(n),
    )  # fmt: skip
    return Activations(values, restore)


def row_warps(n: int) -> int:
    """Warps for a program that holds `n` values."""
    return max(1, min(16, int(triton.next_power_of_2(n)) // 512))
