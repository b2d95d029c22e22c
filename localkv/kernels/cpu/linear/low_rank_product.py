"""The workers of adapters (`kernels/low_rank.py`): A x, and B times that, added to products.

A pair is a matrix and an adapter that changes it. Nothing is computed for a token whose scale of
an adapter is 0. Sums are float32 and in an order that does not depend on other tokens, nor on which
other adapters there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.linear.jobs import (
    EXPAND_ITEMS,
    EXPERT_ADAPTER_ITEMS,
    OUTPUT_ITEMS,
    SHRINK_ITEMS,
    ExpandJob,
    ExpertAdapterJob,
    ExpertItem,
    LowRankItem,
    LowRankOutput,
    ShrinkJob,
)
from localkv.kernels.cpu.linear.rows import multiply_rows, stack_memory
from localkv.simd.arithmetic import add, f32x16, fma, zero_f32
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import (
    get_f32,
    get_i64,
    load_f16,
    load_f32,
    prefetch,
    put_f32,
    reader,
    store_f32,
    take_next,
)

read_shrink_job = reader(ShrinkJob)
read_expand_job = reader(ExpandJob)
read_output = reader(LowRankOutput)
read_pair = reader(LowRankItem)
read_expert_job = reader(ExpertAdapterJob)
read_expert_item = reader(ExpertItem)

TILE = 4
"""Rows of A, and tokens, that meet at a time."""
PANEL_BYTES = 32
"""A column of a panel of B has this size."""
LANES = 16
AHEAD_BYTES = 4096
"""How far ahead B is asked for. A processor's own prefetching ends with a page, of which four
panels of rank 16 are half. On a Sapphire Rapids it saves a hundredth of a token's time in Q4_0."""


@njit
def scale_at(job: Any, pair: Any, token: Count) -> Any:
    return get_f32(job.scales + token * job.scale_bytes, pair.adapter)


@njit
def shrink_tile(job: Any, pair: Any, first: Count, last: Count, token: Count, n: Count) -> None:
    """Rows `first` to `last` of A times `n` tokens, which are 1 or as many as a tile has."""
    row_bytes, x_bytes = 2 * job.n_in, 4 * job.n_in
    stride = job.low_bytes // 4
    x = job.x + token * x_bytes
    row = first
    if n == TILE:
        while row + TILE <= last:
            to = job.low + token * job.low_bytes + 4 * (pair.low + row)
            a = pair.a + row * row_bytes
            multiply_rows("f16", 4, 4, a, row_bytes, x, x_bytes, job.n_in, to, stride, 0, 0)
            row += TILE
        while row < last:
            to = job.low + token * job.low_bytes + 4 * (pair.low + row)
            a = pair.a + row * row_bytes
            multiply_rows("f16", 1, 4, a, row_bytes, x, x_bytes, job.n_in, to, stride, 0, 0)
            row += 1
        return
    while row < last:
        to = job.low + token * job.low_bytes + 4 * (pair.low + row)
        a = pair.a + row * row_bytes
        multiply_rows("f16", 1, 1, a, row_bytes, x, x_bytes, job.n_in, to, stride, 0, 0)
        row += 1


@njit
def shrink_piece(job: Any, pair: Any, first: Count, last: Count, token: Count, end: Count) -> None:
    """Rows `first` to `last` of A times the tokens up to `end` that have some of the adapter."""
    while token < end:
        if scale_at(job, pair, token) == np.float32(0):
            token += 1
            continue
        n = 1
        while n < TILE and token + n < end and scale_at(job, pair, token + n) != np.float32(0):
            n += 1
        if n < TILE:
            n = 1
        shrink_tile(job, pair, first, last, token, n)
        for i in range(token, token + n):
            factor = scale_at(job, pair, i) * get_f32(pair.factor, 0)
            at = job.low + i * job.low_bytes
            for row in range(pair.low + first, pair.low + last):
                put_f32(at, row, get_f32(at, row) * factor)
        token += n


@cfunc("void(int64, int64)", error_model="numpy")
def shrink(address: Address, thread: Count) -> None:
    """A x times factor and scale (`ShrinkJob`)."""
    job = read_shrink_job(address)
    pairs = address + 8 * SHRINK_ITEMS
    n_blocks = (job.n_tokens + job.piece_tokens - 1) // job.piece_tokens
    while True:
        piece = take_next(address)
        token, number = piece % n_blocks * job.piece_tokens, piece // n_blocks
        index = 0
        while index < job.n_pairs:
            rank = read_pair(pairs, index).rank
            n_pieces = (rank + job.piece_rows - 1) // job.piece_rows
            if number < n_pieces:
                break
            number -= n_pieces
            index += 1
        if index == job.n_pairs:
            break
        pair = read_pair(pairs, index)
        first = number * job.piece_rows
        last = min(first + job.piece_rows, pair.rank)
        shrink_piece(job, pair, first, last, token, min(token + job.piece_tokens, job.n_tokens))


@njit
def expand_panel(pair: Any, low: Address, panel: Count) -> Any:
    """16 rows of B times the token's A x."""
    b, total = pair.b + panel * pair.rank * PANEL_BYTES, zero_f32()
    for r in range(pair.rank):
        total = fma(load_f16(b, LANES * r), f32x16(get_f32(low, r)), total)
    return total


@njit
def expand_pair(
    pair: Any, low: Address, out: Address, n_out: Count, first: Count, last: Count, spare: Address
) -> None:
    """Add the rows of panels `first` to `last` to a token's product."""
    rank, panel = pair.rank, first
    step = rank * PANEL_BYTES
    whole = min(last, n_out // LANES)
    while panel + TILE <= whole:
        b = pair.b + panel * step
        t0, t1, t2, t3 = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        for r in range(rank):
            x, at = f32x16(get_f32(low, r)), b + r * PANEL_BYTES
            prefetch(b + r * TILE * PANEL_BYTES, AHEAD_BYTES)
            prefetch(b + r * TILE * PANEL_BYTES, AHEAD_BYTES + 64)
            t0 = fma(load_f16(at, 0), x, t0)
            t1 = fma(load_f16(at + step, 0), x, t1)
            t2 = fma(load_f16(at + 2 * step, 0), x, t2)
            t3 = fma(load_f16(at + 3 * step, 0), x, t3)
        to = out + 4 * LANES * panel
        store_f32(to, 0, add(load_f32(to, 0), t0))
        store_f32(to, LANES, add(load_f32(to, LANES), t1))
        store_f32(to, 2 * LANES, add(load_f32(to, 2 * LANES), t2))
        store_f32(to, 3 * LANES, add(load_f32(to, 3 * LANES), t3))
        panel += TILE
    while panel < whole:
        to = out + 4 * LANES * panel
        store_f32(to, 0, add(load_f32(to, 0), expand_panel(pair, low, panel)))
        panel += 1
    if panel < last:
        store_f32(spare, 0, expand_panel(pair, low, panel))
        for i in range(n_out - LANES * panel):
            at = LANES * panel + i
            put_f32(out, at, get_f32(out, at) + get_f32(spare, i))


@cfunc("void(int64, int64)", error_model="numpy")
def expand(address: Address, thread: Count) -> None:
    """Add B times A x (`ExpandJob`)."""
    job = read_expand_job(address)
    outputs = address + 8 * EXPAND_ITEMS
    pairs = outputs + 8 * OUTPUT_ITEMS * job.n_matrices
    spare = stack_memory(64)
    while True:
        number, index = take_next(address), 0
        while index < job.n_matrices:
            n_panels = read_output(outputs, index).n_panels
            n_chunks = (n_panels + job.chunk - 1) // job.chunk
            if number < n_chunks:
                break
            number -= n_chunks
            index += 1
        if index == job.n_matrices:
            break
        matrix = read_output(outputs, index)
        first = number * job.chunk
        last = min(first + job.chunk, matrix.n_panels)
        for token in range(job.n_tokens):
            out = matrix.out + 4 * token * matrix.n_out
            for i in range(matrix.n_pairs):
                pair = read_pair(pairs, matrix.first_pair + i)
                if get_f32(job.scales + token * job.scale_bytes, pair.adapter) != np.float32(0):
                    low = job.low + token * job.low_bytes + 4 * pair.low
                    expand_pair(pair, low, out, matrix.n_out, first, last, spare)


@njit
def expert_pair(job: Any, item: Any, x: Address, low: Address, expert: Count, scale: Any) -> Any:
    """The `LowRankItem` of an expert, and A x of a row times factor and scale in its place."""
    a = item.a + expert * item.a_bytes
    row_bytes = 2 * job.n_in
    factor = scale * get_f32(item.factor, 0)
    for row in range(item.rank):
        at = a + row * row_bytes
        multiply_rows("f16", 1, 1, at, row_bytes, x, 0, job.n_in, low + 4 * row, 0, 0, 0)
        put_f32(low, row, get_f32(low, row) * factor)
    b = item.b + expert * item.b_bytes + 2 * item.first * item.rank
    return LowRankItem(a, b, item.rank, item.adapter, item.low, item.factor)


@cfunc("void(int64, int64)", error_model="numpy")
def expert_rows(address: Address, thread: Count) -> None:
    """Add B times A x, each expert's, to rows (`ExpertAdapterJob`)."""
    job = read_expert_job(address)
    outputs = address + 8 * EXPERT_ADAPTER_ITEMS
    items = outputs + 8 * OUTPUT_ITEMS * job.n_matrices
    spare = stack_memory(64)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        pair = get_i64(job.pairs, row)
        token, expert = pair // job.n_used, get_i64(job.experts, pair)
        x = job.x + 4 * job.n_in * (token if job.by_token else row)
        for index in range(job.n_matrices):
            matrix = read_output(outputs, index)
            out = matrix.out + 4 * row * matrix.n_out
            for i in range(matrix.n_pairs):
                item = read_expert_item(items, matrix.first_pair + i)
                scale = get_f32(job.scales + token * job.scale_bytes, item.adapter)
                if scale != np.float32(0):
                    low = job.low + row * job.low_bytes + 4 * item.low
                    part = expert_pair(job, item, x, low, expert, scale)
                    expand_pair(part, low, out, matrix.n_out, 0, matrix.n_panels, spare)
