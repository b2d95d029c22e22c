"""Per-layer embeddings: rows of their own that layers read; see `PerLayerInputSpec`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Array
from localkv.kernels.activation import activated
from localkv.kernels.layer_weights import LayerWeights, Linear, Norm
from localkv.kernels.namespace import namespace
from localkv.kernels.stream_weights import PerLayerTable


def looked_up(table: PerLayerTable, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Rows of tokens, read where the file is mapped: [tokens, L * P] on the host."""
    return table.token_embd[token_ids].decode()


def layer_inputs(
    x: Array,
    rows: Array,
    table: PerLayerTable,
    linear: Callable[[Array, Linear], Array],
    norm: Callable[[Array, Norm], Array],
) -> Array:
    """What each layer reads of each token: [L, tokens, P], contiguous.

    Args:
        x: [tokens, n_embd], the scaled embedding.
        rows: [tokens, L * P], as `looked_up`.
    """
    xp = namespace(x)
    n_tokens, width = len(x), table.proj_norm.weight.shape[0]
    projected = linear(x, table.model_proj) * (1.0 / math.sqrt(x.shape[-1]))
    projected = norm(projected.reshape(-1, width), table.proj_norm)
    both = (projected + math.sqrt(width) * rows.reshape(-1, width)) * math.sqrt(0.5)
    # sums keep the order of their terms in memory, stacks don't
    return xp.stack(list(xp.swapaxes(both.reshape(n_tokens, -1, width), 0, 1)))


def layer_input(
    x: Array,
    row: Array,
    layer: LayerWeights,
    linear: Callable[[Array, Linear], Array],
    norm: Callable[[Array, Norm], Array],
) -> Array:
    """What a layer's embedding adds to x: [tokens, n_embd].

    Args:
        row: [tokens, P], the layer's of `layer_inputs`.
    """
    weights = layer.per_layer_input
    assert weights is not None
    gate = activated(linear(x, weights.inp_gate), "gelu") * row
    return norm(linear(gate, weights.proj), weights.post_norm)
