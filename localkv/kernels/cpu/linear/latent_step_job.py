"""What the workers between products of latent attention get: arrays of int64, read as named tuples.

Items as in `activation_job.py`; rows are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from localkv.kernels.cpu.runtime.chain import Item


class LatentRowsJob(NamedTuple):
    """Rows of a latent and a rotated part become two: the latent normed, the other turned.

    Attributes:
        next_row: the row to take next.
        n_rows, latent_dim, rope_dim: sizes.
        x: [n_rows, latent_dim + rope_dim].
        weight, eps: of RMSNorm.
        latent, rotated: [n_rows, latent_dim] and [n_rows, rope_dim].
        n_pairs, neighbours, cos, sin: as in `RopeJob`; 0 pairs are not turned.
    """

    next_row: Item
    n_rows: Item
    latent_dim: Item
    rope_dim: Item
    x: Item
    weight: Item
    eps: Item
    latent: Item
    rotated: Item
    n_pairs: Item = 0
    neighbours: Item = 0
    cos: Item = 0
    sin: Item = 0


class LatentQueriesJob(NamedTuple):
    """Heads of q: scaled, and their rotated parts turned, in places of their own.

    Attributes:
        next_row: the token to take next.
        n_rows, n_heads, nope_dim, rope_dim: sizes.
        x: [n_rows, n_heads, nope_dim + rope_dim]; scaled in place.
        rotated: [n_rows, n_heads, rope_dim].
        scale: [n_rows], or 0.
        n_pairs, neighbours, cos, sin: as in `RopeJob`; 0 pairs are not turned.
    """

    next_row: Item
    n_rows: Item
    n_heads: Item
    nope_dim: Item
    rope_dim: Item
    x: Item
    rotated: Item
    scale: Item = 0
    n_pairs: Item = 0
    neighbours: Item = 0
    cos: Item = 0
    sin: Item = 0
