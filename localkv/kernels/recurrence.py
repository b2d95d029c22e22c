"""What recurrent mixers are composed of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localkv.cache.arrays import Array, Batch, StateRows
from localkv.kernels.causal_conv import sequences
from localkv.kernels.layer_weights import Linear, Norm
from localkv.kernels.namespace import namespace

Scan = Callable[[Array, Array, Array, Array, Array | None, StateRows, Batch], Array]
"""As `scan_by_token`."""


def scan_by_token(
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array | None,
    state: StateRows,
    batch: Batch,
) -> Array:
    """M <- decay * M; M <- M + k (x) added; out = M^T q, for each token. What is added is v, or
    beta * (v - M^T k), which is the delta rule.

    Args:
        q, k: [tokens, heads, rows of M].
        v: [tokens, heads, columns of M].
        decay, beta: [tokens, heads].
        state: whose memories are M before the batch, and after it then.

    Returns:
        [tokens, heads, columns of M].
    """
    memories, xp, out = state.memory, namespace(v), namespace(v).empty_like(v)
    assert memories is not None
    for tokens, slot in sequences(batch):
        memory = memories[slot][0]
        for t in range(tokens.start, tokens.stop):
            memory = memory * decay[t][:, None, None]
            key, added = k[t][:, :, None], v[t]
            if beta is not None:
                added = (added - xp.sum(memory * key, axis=1)) * beta[t][:, None]
            memory = memory + key * added[:, None]
            out[t] = xp.sum(memory * q[t][:, :, None], axis=1)
        memories[slot] = xp.asarray(memory, dtype=xp.float32)[None]
    return out


@dataclass(frozen=True)
class Recurrence:
    """Operations of one kind of array.

    Attributes:
        norm: of rows, along the last axis.
        linear: (x [tokens, n_in], matrix and bias) -> [tokens, n_out].
        scan: see `scan_by_token`.
    """

    norm: Callable[[Array, Norm], Array]
    linear: Callable[[Array, Linear], Array]
    scan: Scan = scan_by_token
