"""LFM2's gated short convolution, composed."""

from __future__ import annotations

from localkv.arch.spec import LayerSpec, ShortConvSpec
from localkv.cache.arrays import Array, Batch, LayerCache
from localkv.kernels.backend import TokenInputs
from localkv.kernels.causal_conv import causal_conv
from localkv.kernels.layer_weights import LayerWeights, ShortConvWeights
from localkv.kernels.recurrence import Recurrence


def short_conv(
    p: Recurrence,
    x: Array,
    layer: LayerWeights,
    spec: LayerSpec,
    inputs: TokenInputs,
    cache: LayerCache,
    batch: Batch,
) -> Array:
    """As `Backend.mixers` has it: c * conv(b * values)."""
    weights, conv, state = layer.mixer, spec.mixer, cache.state
    assert isinstance(weights, ShortConvWeights)
    assert isinstance(conv, ShortConvSpec)
    assert state is not None
    h = x if layer.attn_norm is None else p.norm(x, layer.attn_norm)
    parts = p.linear(h, weights.in_proj).reshape(len(x), 3, conv.width)
    b, c, values = parts[:, 0], parts[:, 1], parts[:, 2]
    return c * causal_conv(b * values, weights.conv, state, batch)
