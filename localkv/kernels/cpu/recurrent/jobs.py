"""What the workers of recurrent layers get: arrays of int64, read as named tuples.

Where a chain makes a job, an item may also name memory, or a number that the chain is given when it
runs; workers find an address, or the number. Values are float32; strides and offsets are bytes.

Batches and states are the same in all of them:

    n_sequences, starts, slots: of the batch: int32 [n_sequences + 1] and int64 [n_sequences].
    after: int64 [tokens], where the states after each token go: to their sequence's slot, or to one
        that none has. A token reads the states after the one before it.
    states, slot_stride: all states, and from one slot to the next; `state_at`: where in a slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from localkv.kernels.cpu.runtime.chain import Item
from localkv.simd import LANES


class ConvJob(NamedTuple):
    """A convolution over the last tokens, silu, and unit lengths of the first blocks.

    Attributes:
        next_piece: the piece to take next: a block of channels of a sequence.
        n_channels, block: channels, and how many a block has, a multiple of 16.
        x, x_at, stride: rows with n_channels at some place, and from one token to the next.
        weight: [kernel, n_channels].
        bias: [n_channels], or 0.
        out: [tokens, n_channels].
        n_unit: leading blocks that get a length of 1.
        n_scaled: leading blocks that are then multiplied by the scale.
        numbers: eps, which is added to the sum of squares, and the scale.
    """

    next_piece: Item
    n_sequences: Item
    starts: Item
    slots: Item
    after: Item
    states: Item
    slot_stride: Item
    state_at: Item
    n_channels: Item
    block: Item
    x: Item
    x_at: Item
    stride: Item
    weight: Item
    out: Item
    bias: Item = 0
    n_unit: Item = 0
    n_scaled: Item = 0
    numbers: Item = 0


class GatedConvJob(NamedTuple):
    """c * conv(b * y), of rows [b; c; y].

    Attributes:
        next_piece: the piece to take next: a block of channels of a sequence.
        n_channels, block: of each of b, c and y, and how many a block has, a multiple of 16.
        x: [tokens, 3 * n_channels].
        weight: [kernel, n_channels].
        out: [tokens, n_channels].
    """

    next_piece: Item
    n_sequences: Item
    starts: Item
    slots: Item
    after: Item
    states: Item
    slot_stride: Item
    state_at: Item
    n_channels: Item
    block: Item
    x: Item
    weight: Item
    out: Item


class ScanJob(NamedTuple):
    """Memories that take in a token after the other.

    Attributes:
        next_piece: the piece to take next: columns of a head of a sequence.
        n_heads, n_rows, n_columns: of the memories.
        n_keys, times: heads of k and q; head h reads h mod `n_keys`, or h div `times` if that is
            not 0.
        mixed, stride: rows with q, k and v, at `q_at`, `k_at` and `v_at`, and from one token to the
            next.
        alpha, alpha_at, alpha_stride: [n_heads], and where in rows of how many bytes; where
            memories fade by channel, decays [n_heads, n_rows].
        beta: [tokens, n_heads], or 0.
        dt, a: [n_heads], or 0 where memories fade by channel.
        out: [tokens, n_heads * n_columns].
    """

    next_piece: Item
    n_sequences: Item
    starts: Item
    slots: Item
    after: Item
    states: Item
    slot_stride: Item
    state_at: Item
    n_heads: Item
    n_rows: Item
    n_columns: Item
    n_keys: Item
    times: Item
    mixed: Item
    stride: Item
    q_at: Item
    k_at: Item
    v_at: Item
    alpha: Item
    alpha_at: Item
    alpha_stride: Item
    dt: Item
    a: Item
    out: Item
    beta: Item = 0


class OutputJob(NamedTuple):
    """The output's norm and gate, in place.

    Attributes:
        next_row: the token to take next.
        n_tokens, n_groups, n: sizes; a token has n_groups * n values, each group its norm.
        x: [tokens, n_groups * n].
        z, z_stride: the gate, and from one token to the next.
        weight, weight_stride: of the norm, or 0; from one group's to the next.
        eps: one float32, or 0.
        skipped, skipped_stride: what goes on as it is, and from one token to the next, or 0.
        d: [n_groups * n], how much of it, or 0.
        is_sigmoid: the gate's activation is a sigmoid, not silu.
    """

    next_row: Item
    n_tokens: Item
    n_groups: Item
    n: Item
    x: Item
    z: Item
    z_stride: Item
    weight: Item = 0
    weight_stride: Item = 0
    eps: Item = 0
    skipped: Item = 0
    skipped_stride: Item = 0
    d: Item = 0
    is_sigmoid: Item = 0


MOST_VECTORS = 4
"""Vectors of a piece's columns: their sums stay in registers."""


def vectors_of(n_columns: int) -> int:
    """Vectors of columns that a piece has."""
    n = n_columns // LANES
    return next(vectors for vectors in range(MOST_VECTORS, 0, -1) if n % vectors == 0)
