"""A learned residual of low rank beside a mixer; see `LaurelSpec`."""

from __future__ import annotations

import math

from localkv.cache.arrays import Array
from localkv.kernels.backend import Backend
from localkv.kernels.layer_weights import LayerWeights


def with_laurel(backend: Backend, x: Array, layer_input: Array, layer: LayerWeights) -> Array:
    """(x + n + norm(laurel_r laurel_l n)) / sqrt(2), with n the normed input of the mixer.

    Args:
        x: [tokens, n_embd], behind the mixer.
        layer_input: before it.
    """
    weights = layer.laurel
    assert weights is not None
    assert layer.attn_norm is not None
    n = backend.norm(layer_input, layer.attn_norm)
    low = backend.linear(backend.linear(n, weights.laurel_l), weights.laurel_r)
    return (x + n + backend.norm(low, weights.post_norm)) * math.sqrt(0.5)
