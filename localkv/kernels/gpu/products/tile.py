"""The product of a tile of a packed matrix with some tokens: the core of every product kernel.

For one token, codes are multiplied in fp32 and summed over a run before the run's scale is applied:
nothing is rounded to less than fp32. For more tokens, tensor cores multiply fp16 tiles that are
decoded in registers, and add up in fp32. Weights and activations then bear powers of two that keep
them in fp16's range (`PlaneTensor.scale`, `activations.py`). Activations in fp32 are multiplied in
fp32 for any number of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.triton_primitives.float_bits import F16_MAX, saturate
from localkv.triton_primitives.unpack import fence


@triton.jit
def load_activations(x_ptr, column, n_in, EVEN: tl.constexpr):
    """x_ptr and `column` broadcast to the same shape; 0 beyond the end of a row."""
    if EVEN:
        return tl.load(x_ptr + column)
    else:
        return tl.load(x_ptr + column, mask=column < n_in, other=0.0)


@triton.jit
def part_columns(first, P: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
                 UNITS: tl.constexpr):  # fmt: skip
    """[units, run]: the columns that part P of a tile from column `first` on holds."""
    RUN: tl.constexpr = UNIT // PARTS
    unit = first + tl.arange(0, UNITS) * UNIT
    return unit[:, None] + (P * RUN + tl.arange(0, RUN))[None, :]


@triton.jit
def flat_part_columns(first, P: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
                      VALUES: tl.constexpr):  # fmt: skip
    """Columns of a part in one dimension, which loads that are pipelined must have."""
    RUN: tl.constexpr = UNIT // PARTS
    j = tl.arange(0, VALUES // PARTS)
    return first + j // RUN * UNIT + P * RUN + j % RUN


@triton.jit
def scaled_codes(part):
    """fp32 [rows, units, run]: the values of a part of a tile."""
    w = part[0].to(tl.float32)
    if len(part) > 1:
        w = w * part[1][:, :, None]
    if len(part) > 2:
        w += part[2][:, :, None]
    return w


@triton.jit
def half_values(part, w_scale):
    """fp16 [rows, units, run]: the values of a part of a tile, times `w_scale`."""
    w = part[0]
    if len(part) > 1:
        w = w * (part[1] * w_scale).to(tl.float16)[:, :, None]
    elif w.dtype == tl.float32:
        w = (w * w_scale).to(tl.float16)
    if len(part) > 2:
        w += (part[2] * w_scale).to(tl.float16)[:, :, None]
    return w


@triton.jit
def add_run(total, x):
    """fp32 [rows, units] `total` and the values of x [rows, units, run], one after another.

    From 3.8 on Triton's own sum adds a thread's values in pairs, and those in pairs again: half of
    its additions are then no part of a multiply-add.
    """
    n: tl.constexpr = x.shape[2]
    if n == 2:
        a, b = tl.split(x)
        return total + a + b
    else:
        halves = tl.reshape(x, (x.shape[0], x.shape[1], 2, n // 2))
        a, b = tl.split(tl.permute(halves, (0, 1, 3, 2)))
        return add_run(add_run(total, a), b)


@triton.jit
def product_with_token(
    x_ptr, planes, row, first, last, n_in,
    READ: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr,
    EVEN: tl.constexpr, HALVES: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS]: values `first` to `last` of rows `row` [ROWS], times the token at `x_ptr`.

    HALVES: x is rounded to fp16 before."""
    UNITS: tl.constexpr = VALUES // UNIT
    nothing = tl.zeros((ROWS, UNITS), tl.float32)
    total = nothing
    for start in tl.range(first, last, VALUES, num_stages=STAGES):
        parts = READ(planes, row, start, n_in, VALUES, EVEN, PTX)
        for p in tl.static_range(len(parts)):
            part = parts[p]
            column = part_columns(start, p, len(parts), UNIT, UNITS)
            x = load_activations(x_ptr, column, n_in, EVEN).to(tl.float32)
            if HALVES:
                x = saturate(x, F16_MAX).to(tl.float16).to(tl.float32)
            y = add_run(nothing, part[0].to(tl.float32) * x[None, :, :])
            if len(part) > 1:
                y = y * part[1]
            if len(part) > 2:
                y += tl.sum(x, 1)[None, :] * part[2]
            # or the compiler makes vectors across parts, and unpacks all of them before it adds
            total = fence(total + y, PTX)
    return tl.sum(total, 1)


@triton.jit
def product_with_tokens(
    x_ptr, x_row, planes, row, first, last, n_in, w_scale,
    READ: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    VALUES: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, FENCE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS, TOKENS]: the same with rows `x_row` [TOKENS] of x, times `w_scale`."""
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    x_at = x_row.to(tl.int64) * n_in
    for start in tl.range(first, last, VALUES, num_stages=STAGES):
        parts = READ(planes, row, start, n_in, VALUES, EVEN, PTX)
        for p in tl.static_range(len(parts)):
            part = parts[p]
            column = flat_part_columns(start, p, len(parts), UNIT, VALUES)
            x = load_activations(x_ptr + x_at[None, :], column[:, None], n_in, EVEN)
            if x.dtype == tl.float32:
                w = scaled_codes(part) * w_scale
                w = tl.reshape(w, (ROWS, VALUES // len(parts)))
                total = tl.dot(w, x, total, input_precision="ieee")
            else:
                w = fence(half_values(part, w_scale), FENCE)
                total = tl.dot(tl.reshape(w, (ROWS, VALUES // len(parts))), x, total)
    return total


@triton.jit
def product(
    x_ptr, x_row, restore_ptr, planes, row, first, last, n_in, w_scale,
    READ: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    VALUES: tl.constexpr, EVEN: tl.constexpr, HALVES: tl.constexpr, STAGES: tl.constexpr,
    FENCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS, TOKENS], for any number of TOKENS; scales are undone.

    Args:
        x_row: [TOKENS] rows of x.
        restore_ptr: fp32 factors of the rows of x, or None.
        row: [ROWS] rows of the matrix.
    """
    if TOKENS == 1:
        at = tl.max(x_row, 0).to(tl.int64)
        y = product_with_token(
            x_ptr + at * n_in, planes, row, first, last, n_in,
            READ, UNIT, ROWS, VALUES, EVEN, HALVES, STAGES, PTX,
        )[:, None]  # fmt: skip
    else:
        y = product_with_tokens(
            x_ptr, x_row, planes, row, first, last, n_in, w_scale,
            READ, UNIT, ROWS, TOKENS, VALUES, EVEN, STAGES, FENCE, PTX,
        ) * (1.0 / w_scale)  # fmt: skip
        if restore_ptr is not None:
            y = y * tl.load(restore_ptr + x_row)[None, :]
    return y
