"""Kernels for products with up to three matrices of the same input."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.kernels.gpu.products.tile import product


@triton.jit
def _split(n_in, VALUES: tl.constexpr):
    """The columns that this program takes of a row."""
    steps = tl.cdiv(tl.cdiv(n_in, VALUES), tl.num_programs(2))
    first = tl.program_id(2) * steps * VALUES
    return first, tl.minimum(first + steps * VALUES, n_in)


@triton.jit
def _rows(tile, n_rows, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Rows of the output, and those to read, which exist."""
    out_row = tile * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(out_row, n_rows - 1)
    return out_row, row.to(tl.int64) if WIDE else row


@triton.jit
def _tokens(n_tokens, TOKENS: tl.constexpr):
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    return token, tl.minimum(token, n_tokens - 1)


@triton.jit
def _rows_added(n_rows):
    """Rows to which this program adds bias and residual: all or none, as one split does."""
    return tl.where(tl.program_id(2) == 0, n_rows, 0)


@triton.jit
def _one_linear(
    x_ptr, restore_ptr, out_ptr, residual_ptr, tile, planes, w_scale, bias_ptr, n_rows, n_in,
    n_tokens, READ: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    VALUES: tl.constexpr, EVEN: tl.constexpr, HALVES: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, FENCE: tl.constexpr, PTX: tl.constexpr, ACTIVATION: tl.constexpr,
    numbers,
):  # fmt: skip
    out_row, row = _rows(tile, n_rows, ROWS, WIDE)
    token, x_row = _tokens(n_tokens, TOKENS)
    first, last = _split(n_in, VALUES)
    y = product(
        x_ptr, x_row, restore_ptr, planes, row, first, last, n_in, w_scale,
        READ, UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, STAGES, FENCE, PTX,
    )  # fmt: skip
    at = token.to(tl.int64)[None, :] * n_rows + out_row[:, None]
    ok = (out_row < n_rows)[:, None] & (token < n_tokens)[None, :]
    n_added = _rows_added(n_rows)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + out_row, mask=out_row < n_added, other=0.0)[:, None]
    if ACTIVATION is not None:
        y = ACTIVATION(y, numbers)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=ok & (out_row < n_added)[:, None], other=0.0)
    tl.store(out_ptr + at, y, mask=ok)


@triton.jit(do_not_specialize=["n_tokens", "split_stride"])
def linear_kernel(
    x_ptr, restore_ptr, out_ptr, residual_ptr, numbers, n_tokens, n_in, split_stride,
    a_planes, a_scale, a_bias_ptr, a_rows,
    b_planes, b_scale, b_bias_ptr, b_rows,
    c_planes, c_scale, c_bias_ptr, c_rows,
    A: tl.constexpr, A_UNIT: tl.constexpr,
    B: tl.constexpr, B_UNIT: tl.constexpr,
    C: tl.constexpr, C_UNIT: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr, EVEN: tl.constexpr,
    HALVES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, FENCE: tl.constexpr,
    PTX: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Products of the same x with one to three matrices: q, k and v in one launch, of any types.

    Grid: (tiles of rows of all matrices, tiles of tokens, splits). The outputs [n_tokens, rows] lie
    one after another; each split has its own, `split_stride` further, and the first adds bias and
    residual. B and C are None where there are fewer matrices. ACTIVATION(values, `numbers`) of one
    matrix alone, and of rows that are not split, follows the bias, or is None.
    """
    tile = tl.program_id(0)
    out_ptr += tl.program_id(2).to(tl.int64) * split_stride
    a_tiles = tl.cdiv(a_rows, ROWS)
    if B is None:
        _one_linear(
            x_ptr, restore_ptr, out_ptr, residual_ptr, tile, a_planes, a_scale, a_bias_ptr, a_rows,
            n_in, n_tokens, A, A_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, WIDE, STAGES, FENCE, PTX,
            ACTIVATION, numbers,
        )  # fmt: skip
    else:
        b_out_ptr = out_ptr + n_tokens.to(tl.int64) * a_rows
        b_tiles = tl.cdiv(b_rows, ROWS)
        if tile < a_tiles:
            _one_linear(
                x_ptr, restore_ptr, out_ptr, None, tile, a_planes, a_scale, a_bias_ptr, a_rows,
                n_in, n_tokens, A, A_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, WIDE, STAGES, FENCE,
                PTX, None, (),
            )  # fmt: skip
        elif tile < a_tiles + b_tiles:
            _one_linear(
                x_ptr, restore_ptr, b_out_ptr, None, tile - a_tiles, b_planes, b_scale, b_bias_ptr,
                b_rows, n_in, n_tokens, B, B_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, WIDE, STAGES,
                FENCE, PTX, None, (),
            )  # fmt: skip
        else:
            if C is not None:
                _one_linear(
                    x_ptr, restore_ptr, b_out_ptr + n_tokens.to(tl.int64) * b_rows, None,
                    tile - a_tiles - b_tiles, c_planes, c_scale, c_bias_ptr, c_rows, n_in, n_tokens,
                    C, C_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, WIDE, STAGES, FENCE, PTX,
                    None, (),
                )  # fmt: skip


@triton.jit(do_not_specialize=["n_tokens", "split_stride"])
def gate_up_kernel(
    x_ptr, restore_ptr, out_ptr, n_tokens, n_in, n_rows, split_stride,
    gate_planes, gate_scale, gate_bias_ptr, up_planes, up_scale, up_bias_ptr,
    GATE: tl.constexpr, GATE_UNIT: tl.constexpr, UP: tl.constexpr, UP_UNIT: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr, EVEN: tl.constexpr,
    HALVES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, FENCE: tl.constexpr,
    PTX: tl.constexpr, SPLIT: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """ACTIVATION(gate, up), [n_tokens, n_rows]. Grid: (tiles of rows, tiles of tokens, splits).

    With SPLIT the two stay separate, for they must be whole first: [splits, 2, n_tokens, n_rows].
    """
    out_row, row = _rows(tl.program_id(0), n_rows, ROWS, WIDE)
    token, x_row = _tokens(n_tokens, TOKENS)
    first, last = _split(n_in, VALUES)
    gate = product(
        x_ptr, x_row, restore_ptr, gate_planes, row, first, last, n_in, gate_scale,
        GATE, GATE_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, STAGES, FENCE, PTX,
    )  # fmt: skip
    up = product(
        x_ptr, x_row, restore_ptr, up_planes, row, first, last, n_in, up_scale,
        UP, UP_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, STAGES, FENCE, PTX,
    )  # fmt: skip
    n_added = _rows_added(n_rows)
    if gate_bias_ptr is not None:
        gate += tl.load(gate_bias_ptr + out_row, mask=out_row < n_added, other=0.0)[:, None]
    if up_bias_ptr is not None:
        up += tl.load(up_bias_ptr + out_row, mask=out_row < n_added, other=0.0)[:, None]
    at = token.to(tl.int64)[None, :] * n_rows + out_row[:, None]
    ok = (out_row < n_rows)[:, None] & (token < n_tokens)[None, :]
    if SPLIT:
        out_ptr += tl.program_id(2).to(tl.int64) * split_stride
        tl.store(out_ptr + at, gate, mask=ok)
        tl.store(out_ptr + n_tokens.to(tl.int64) * n_rows + at, up, mask=ok)
    else:
        tl.store(out_ptr + at, ACTIVATION(gate, up), mask=ok)
