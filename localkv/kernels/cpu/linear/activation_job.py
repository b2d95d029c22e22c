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


class RopeJob(NamedTuple):
    """Heads to be normed and turned, in place.

    Attributes:
        next_token: the token to take next.
        n_tokens, n_heads, head_dim: sizes.
        x: [n_tokens, n_heads, head_dim].
        weight, eps: of RMSNorm of a head, or 0.
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


NORM_ITEMS, GATE_ITEMS, ROPE_ITEMS = (len(kind._fields) for kind in (NormJob, GateJob, RopeJob))
