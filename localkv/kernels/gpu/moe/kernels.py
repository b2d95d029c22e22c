"""Kernels for the products of routed experts, on packed stacks of matrices."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.kernels.gpu.products.tile import product


@triton.jit
def _pairs(expert_ptr, first_ptr, end_ptr, order_ptr, TOKENS: tl.constexpr):
    """The tile's expert, its pairs [TOKENS] and which of them exist. Without `order_ptr` each tile
    is the pair of its own number."""
    tile = tl.program_id(1)
    expert = tl.load(expert_ptr + tile)
    slot = tl.arange(0, TOKENS)
    if order_ptr is None:
        return expert, tile + slot, slot == 0
    else:
        at = tl.load(first_ptr + tile) + slot
        end = tl.load(end_ptr + tile)
        # a tile that has nothing to do is left before it reads anything
        pair = tl.load(order_ptr + tl.minimum(at, tl.maximum(end - 1, 0)))
        return expert, pair, at < end


@triton.jit
def _expert_rows(expert, n_rows, stack_rows, start, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Rows of the output, and those to read of the stack, where an expert has `stack_rows` and
    these begin at `start`."""
    out_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = start + tl.minimum(out_row, n_rows - 1)
    if WIDE:
        return out_row, expert.to(tl.int64) * stack_rows + row
    else:
        return out_row, expert * stack_rows + row


@triton.jit
def experts_gate_up_kernel(
    x_ptr, restore_ptr, weights_ptr, out_ptr, expert_ptr, first_ptr, end_ptr, order_ptr,
    n_experts, n_in, n_rows, stack_rows, up_start,
    gate_planes, gate_scale, gate_bias_ptr, up_planes, up_scale, up_bias_ptr,
    N_USED: tl.constexpr, ACTIVATION: tl.constexpr,
    GATE: tl.constexpr, GATE_UNIT: tl.constexpr, UP: tl.constexpr, UP_UNIT: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr, EVEN: tl.constexpr,
    HALVES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, FENCE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """ACTIVATION(gate, up) of each pair's token and expert: [pairs, n_rows].
    Grid: (tiles of rows, tiles of pairs).

    Without a GATE up takes its place, and 1 its own. Biases, of `stack_rows` each, may be None.
    With `weights_ptr` what an expert reads is multiplied by the pair's weight.
    """
    expert, pair, ok = _pairs(expert_ptr, first_ptr, end_ptr, order_ptr, TOKENS)
    if expert < n_experts:
        x_row = pair // N_USED
        if GATE is not None:
            out_row, row = _expert_rows(expert, n_rows, stack_rows, 0, ROWS, WIDE)
            gate = product(
                x_ptr, x_row, restore_ptr, gate_planes, row, 0, n_in, n_in, gate_scale,
                GATE, GATE_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, STAGES, FENCE, PTX,
            )  # fmt: skip
            if weights_ptr is not None:
                gate *= tl.load(weights_ptr + pair)[None, :]
            if gate_bias_ptr is not None:
                gate += tl.load(gate_bias_ptr + row)[:, None]
        out_row, row = _expert_rows(expert, n_rows, stack_rows, up_start, ROWS, WIDE)
        up = product(
            x_ptr, x_row, restore_ptr, up_planes, row, 0, n_in, n_in, up_scale,
            UP, UP_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, STAGES, FENCE, PTX,
        )  # fmt: skip
        if weights_ptr is not None:
            up *= tl.load(weights_ptr + pair)[None, :]
        if up_bias_ptr is not None:
            up += tl.load(up_bias_ptr + row)[:, None]
        if GATE is not None:
            y = ACTIVATION(gate, up)
        else:
            y = ACTIVATION(up, 1.0)
        at = pair.to(tl.int64)[None, :] * n_rows + out_row[:, None]
        tl.store(out_ptr + at, y, mask=(out_row < n_rows)[:, None] & ok[None, :])


@triton.jit
def experts_down_kernel(
    x_ptr, restore_ptr, weights_ptr, out_ptr, expert_ptr, first_ptr, end_ptr, order_ptr,
    n_experts, n_in, n_rows, planes, w_scale, expert_scale_ptr, bias_ptr,
    DOWN: tl.constexpr, DOWN_UNIT: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr, EVEN: tl.constexpr,
    HALVES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, FENCE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Each pair's row of x through its expert, times its weight: [pairs, n_rows].
    Grid: (tiles of rows, tiles of pairs).

    The experts' factors and biases may be None, as the weights.
    """
    expert, pair, ok = _pairs(expert_ptr, first_ptr, end_ptr, order_ptr, TOKENS)
    if expert < n_experts:
        out_row, row = _expert_rows(expert, n_rows, n_rows, 0, ROWS, WIDE)
        y = product(
            x_ptr, pair, restore_ptr, planes, row, 0, n_in, n_in, w_scale,
            DOWN, DOWN_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, STAGES, FENCE, PTX,
        )  # fmt: skip
        if expert_scale_ptr is not None:
            y *= tl.load(expert_scale_ptr + expert)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + row)[:, None]
        if weights_ptr is not None:
            y *= tl.load(weights_ptr + pair)[None, :]
        at = pair.to(tl.int64)[None, :] * n_rows + out_row[:, None]
        tl.store(out_ptr + at, y, mask=(out_row < n_rows)[:, None] & ok[None, :])


@triton.jit
def combine_kernel(
    pairs_ptr, residual_ptr, shared_ptr, x_ptr, gate_ptr, out_ptr, n,
    N_USED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The sum of a token's pairs, of the residual and of the shared expert's output.

    That one is multiplied with sigmoid(x . gate), unless `gate_ptr` is None. Grid: (tokens,).
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, N)
    ok = column < n
    y = tl.zeros((N,), tl.float32)
    for i in tl.static_range(N_USED):
        y += tl.load(pairs_ptr + (token * N_USED + i) * n + column, mask=ok, other=0.0)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * n + column, mask=ok, other=0.0)
        if gate_ptr is not None:
            x = tl.load(x_ptr + token * n + column, mask=ok, other=0.0).to(tl.float32)
            gate = tl.load(gate_ptr + column, mask=ok, other=0.0)
            shared = shared * tl.sigmoid(tl.sum(x * gate, 0))
        y += shared
    if residual_ptr is not None:
        y += tl.load(residual_ptr + token * n + column, mask=ok, other=0.0)
    tl.store(out_ptr + token * n + column, y, mask=ok)
