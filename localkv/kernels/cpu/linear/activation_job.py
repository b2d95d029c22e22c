"""What the workers between products get: arrays of int64, read as named tuples.

Where a chain makes a job, an item may also name memory, or a number that the chain is given when it
runs; workers find an address, or the number. Rows are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from localkv.kernels.cpu.runtime.chain import Item


class NormJob(NamedTuple):
    """Rows to be normed.

    Attributes:
        next_row: the row to take next.
        n_rows, n: rows, and values of a row.
        x, out: [n_rows, n]; the same only for RMSNorm.
        weight, bias: [n]; RMSNorm has no bias, LayerNorm may have none (0).
        eps: one float32.
    """

    next_row: Item
    n_rows: Item
    n: Item
    x: Item
    weight: Item
    eps: Item
    out: Item
    bias: Item = 0


class GateJob(NamedTuple):
    """activation(gate) * up, in the place of `gate`; `n` values, a multiple of 16."""

    next_part: Item
    n: Item
    gate: Item
    up: Item


class ActivationJob(NamedTuple):
    """activation(x) in place of x, times `up` where the block is gated.

    Attributes:
        next_row: the row to take next.
        n_rows, n: rows, and values of one, a multiple of 16.
        x, up: [n_rows, n]; `up` is 0 without a gate.
        parameters: float32 [4], those of xIELU as they are used (alpha_p, alpha_n, beta, eps) and,
            with sparsity, the number of standard deviations; or 0.
    """

    next_row: Item
    n_rows: Item
    n: Item
    x: Item
    up: Item = 0
    parameters: Item = 0


class ResidualJob(NamedTuple):
    """out = residual + scale * norm(x), row by row.

    Attributes:
        next_row: the row to take next.
        n_rows, n: rows, and values of one.
        x: [n_rows, n]; its rows are overwritten.
        weight, eps: of RMSNorm, or 0.
        scale: one float32.
        residual, out: [n_rows, n].
    """

    next_row: Item
    n_rows: Item
    n: Item
    x: Item
    weight: Item
    eps: Item
    scale: Item
    residual: Item
    out: Item


class SplitJob(NamedTuple):
    """q and its gate, which a product gives head by head, to places of their own.

    Attributes:
        next_row: the token to take next.
        n_rows, n_heads, head_dim: sizes; `head_dim` is a multiple of 16.
        both: [n_rows, n_heads, 2, head_dim].
        q, gate: [n_rows, n_heads, head_dim].
    """

    next_row: Item
    n_rows: Item
    n_heads: Item
    head_dim: Item
    both: Item
    q: Item
    gate: Item


class SinkJob(NamedTuple):
    """Sums of attention to be shared with sinks, in place.

    Attributes:
        next_row: the token to take next.
        n_rows, n_heads, head_dim: sizes; `head_dim` is a multiple of 16.
        x: [n_rows, n_heads, head_dim].
        lse: [n_rows, n_heads], log-sum-exp of a head's logits.
        sinks: [n_heads], the logit of each head's sink.
    """

    next_row: Item
    n_rows: Item
    n_heads: Item
    head_dim: Item
    x: Item
    lse: Item
    sinks: Item


class MergeJob(NamedTuple):
    """Sums of attention over up to five segments to be merged, in the place of the first.

    Attributes:
        next_row: the token to take next.
        n_rows, n_heads, head_dim: sizes; `head_dim` is a multiple of 16.
        n_parts: of segments.
        sinks: [n_heads], the logit of each head's sink, or 0 for none.
        x0 to x4: [n_rows, n_heads, head_dim] of each segment.
        lse0 to lse4: [n_rows, n_heads], log-sum-exp of a head's logits in each segment.
    """

    next_row: Item
    n_rows: Item
    n_heads: Item
    head_dim: Item
    n_parts: Item
    sinks: Item
    x0: Item
    x1: Item
    x2: Item
    x3: Item
    x4: Item
    lse0: Item
    lse1: Item
    lse2: Item
    lse3: Item
    lse4: Item


MOST_PARTS = 5
"""Segments of a merge."""


class RopeJob(NamedTuple):
    """Heads to be normed and turned, in place.

    Attributes:
        next_token: the token to take next.
        n_tokens, n_heads, head_dim: sizes.
        x: [n_tokens, n_heads, head_dim].
        weight, eps: of a norm of each head, or 0.
        weight_stride: bytes from one head's weight to the next; 0 if all have one.
        centred: the mean is taken off first (LayerNorm).
        norm_last: the norm comes after RoPE.
        n_pairs: pairs of channels that are turned, or 0.
        neighbours: whether the channels of a pair are neighbours (`RopeSpec.interleaved`).
        cos, sin: [n_tokens, n_pairs], or 0.
    """

    next_token: Item
    n_tokens: Item
    n_heads: Item
    head_dim: Item
    x: Item
    weight: Item = 0
    eps: Item = 0
    n_pairs: Item = 0
    neighbours: Item = 0
    cos: Item = 0
    sin: Item = 0
    weight_stride: Item = 0
    centred: Item = 0
    norm_last: Item = 0
