"""Depthwise convolution over the last few tokens of a sequence, of NumPy's and torch's kind.

Each token's result is the same in any chunks of its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

from localkv.cache.arrays import Array, Batch, StateRows
from localkv.kernels.namespace import namespace


def sequences(batch: Batch) -> Iterator[tuple[slice, Array]]:
    """Of each sequence, its tokens and its slot, int64 [1]; nothing asks the device."""
    for i in range(len(batch.starts) - 1):
        yield slice(batch.starts[i], batch.starts[i + 1]), batch.slots[i : i + 1]


def causal_conv(x: Array, weight: Array, state: StateRows, batch: Batch) -> Array:
    """y[t] = sum over j of weight[:, j] * x[t - n + 1 + j], n the kernel's length; rows before the
    sequence's first are 0.

    Args:
        x: [tokens, channels].
        weight: [channels, n].
        state: the rows before the batch's, which are those after it then.
    """
    xp = namespace(x)
    n_rows = weight.shape[1] - 1
    out = xp.empty_like(x)
    for tokens, slot in sequences(batch):
        rows = xp.concatenate((xp.asarray(state.rows[slot][0], dtype=x.dtype), x[tokens]))
        n = len(rows) - n_rows
        y = rows[:n] * weight[:, 0]
        for j in range(1, n_rows + 1):
            y = y + rows[j : j + n] * weight[:, j]
        out[tokens] = y
        state.rows[slot] = xp.asarray(rows[n:], dtype=xp.float32)[None]
    return out
