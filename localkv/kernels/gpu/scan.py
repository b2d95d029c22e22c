"""Memories that take in a token after the other, in registers: the gated delta rule and Mamba-2.

One kernel for prompts and for a token; nothing asks the host, so that a step can be recorded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.cache.arrays import Batch, StateRows
from localkv.kernels.bounds import BoundsError, check_array
from localkv.kernels.gpu.launch import launch

COLUMNS = 32
"""Columns of a memory that a program has, at most."""
VALUES = 4096
"""Values of a memory that a program holds, at most: 32 registers of each of 128 threads."""


@triton.jit(do_not_specialize=["n_heads"])
def scan_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, memory_ptr, start_ptr, slot_ptr, out_ptr,
    n_heads, slot_stride,
    ROWS: tl.constexpr, N_ROWS: tl.constexpr, N_COLUMNS: tl.constexpr, COLUMNS: tl.constexpr,
    BY_ROW: tl.constexpr,
):  # fmt: skip
    """M <- decay * M + k (x) added, out = M^T q, for each token; M is [N_ROWS, N_COLUMNS].

    What is added is v, or beta * (v - M^T k) unless `beta_ptr` is None. Each row of M has a decay
    of its own if BY_ROW.
    Grid (parts of COLUMNS columns, heads, sequences).
    """
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = row < N_ROWS, column < N_COLUMNS
    ok = in_rows[:, None] & in_columns[None, :]
    slot = tl.load(slot_ptr + sequence)
    at = memory_ptr + slot * slot_stride + head * (N_ROWS * N_COLUMNS)
    at += row[:, None] * N_COLUMNS + column[None, :]
    memory = tl.load(at, mask=ok, other=0.0)
    for token in range(tl.load(start_ptr + sequence), tl.load(start_ptr + sequence + 1)):
        place = token * n_heads + head
        key = tl.load(k_ptr + place * N_ROWS + row, mask=in_rows, other=0.0)
        query = tl.load(q_ptr + place * N_ROWS + row, mask=in_rows, other=0.0)
        added = tl.load(v_ptr + place * N_COLUMNS + column, mask=in_columns, other=0.0)
        if BY_ROW:
            decay = tl.load(decay_ptr + place * N_ROWS + row, mask=in_rows, other=0.0)
            memory *= decay[:, None]
        else:
            memory *= tl.load(decay_ptr + place)
        if beta_ptr is not None:
            predicted = tl.sum(memory * key[:, None], 0)
            added = (added - predicted) * tl.load(beta_ptr + place)
        memory += key[:, None] * added[None, :]
        out = tl.sum(memory * query[:, None], 0)
        tl.store(out_ptr + place * N_COLUMNS + column, out, mask=in_columns)
    tl.store(at, memory, mask=ok)


def columns_of(n_rows: int, n_columns: int) -> int:
    """Columns that a program has."""
    rows, columns = (1 << (n - 1).bit_length() for n in (n_rows, n_columns))
    return min(COLUMNS, max(1, VALUES // rows), columns)


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: StateRows,
    batch: Batch,
) -> Tensor:  # fmt: skip
    """What `kernels/recurrent.scan_by_token` computes.

    Raises:
        BoundsError: an array is not what the kernel reads.
    """
    memory, n_sequences = state.memory, len(batch.slots)
    assert memory is not None
    n_tokens, n_heads, n_columns = v.shape
    n_rows = k.shape[-1]
    if memory.shape[1:] != (n_heads, n_rows, n_columns) or memory[0].is_contiguous() is False:
        raise BoundsError(f"memories {tuple(memory.shape)} of {n_heads} x {n_rows} x {n_columns}")
    if batch.starts[-1] != n_tokens or len(batch.starts) != n_sequences + 1:
        raise BoundsError(f"{n_tokens} tokens of {n_sequences} sequences at {batch.starts}")
    q, k, v, decay = (x.contiguous() for x in (q, k, v, decay))
    check_array("q", q, "float32", n_tokens, n_heads, n_rows)
    check_array("k", k, "float32", n_tokens, n_heads, n_rows)
    check_array("v", v, "float32", n_tokens, n_heads, n_columns)
    by_row = decay.ndim == 3
    check_array("decay", decay, "float32", n_tokens, n_heads, *([n_rows] if by_row else []))
    if beta is not None:
        beta = beta.contiguous()
        check_array("beta", beta, "float32", n_tokens, n_heads)
    out = torch.empty_like(v)
    columns = columns_of(n_rows, n_columns)
    launch(
        scan_kernel,
        (triton.cdiv(n_columns, columns), n_heads, n_sequences),
        q, k, v, decay, beta, memory, batch.start_table, batch.slots, out,
        n_heads, memory.stride(0),
        ROWS=triton.next_power_of_2(n_rows), N_ROWS=n_rows, N_COLUMNS=n_columns, COLUMNS=columns,
        BY_ROW=by_row, num_warps=4,
    )  # fmt: skip
    return out
