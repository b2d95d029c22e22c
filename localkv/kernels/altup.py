"""AltUp: several residual streams, of which a layer works on one; see `AltUpSpec`.

After llama.cpp's `src/models/gemma3n.cpp`. Streams are [tokens, S, n_embd], so that a token's
result is the same alone as in any batch.
"""

from __future__ import annotations

from localkv.arch.spec import LayerSpec
from localkv.cache.arrays import Array
from localkv.kernels.backend import Backend
from localkv.kernels.layer_weights import AltUpWeights, LayerWeights
from localkv.kernels.namespace import namespace
from localkv.kernels.per_layer_input import layer_input
from localkv.kernels.stream_weights import AltUpProjections

SMALLEST = 1e-30
"""Squares are never summed to less, so that a row of zeros stays one."""


class AltUpStreams:
    """Streams of a batch's tokens, made of their embedding x [tokens, n_embd]."""

    def __init__(self, x: Array, projections: AltUpProjections, backend: Backend) -> None:
        self.backend = backend
        self.projections = projections
        others = (backend.linear(x, proj) for proj in projections.proj)
        self.streams = namespace(x).stack([x, *(as_long_as(x, z) for z in others)], 1)

    def enter(self, layer: LayerWeights) -> Array:
        """Predict all streams; the layer works on the first."""
        weights, x = _altup(layer), self.streams
        n_streams = x.shape[1]
        coefs = _products(self._routed(x[:, 0], weights), weights.predict_coef)
        self.streams = x + namespace(x).matmul(coefs.reshape(-1, n_streams, n_streams), x)
        return self.streams[:, 0]

    def keep(self, rows: Array) -> None:
        self.streams = self.streams[rows]

    def leave(self, x: Array, layer: LayerWeights, spec: LayerSpec, row: Array | None) -> None:
        """Correct all streams by what the layer made of the first; its embedding changes those
        that it did not work on."""
        weights = _altup(layer)
        coefs = 1.0 + _products(self._routed(x, weights), weights.correct_coef)
        change = x - self.streams[:, 0]
        self.streams = self.streams + coefs[:, :, None] * change[:, None]
        if row is not None:
            source = self.streams[:, 0] * weights.correct_scale
            added = layer_input(source, row, layer, self.backend.linear, self.backend.norm)
            self.streams[:, 1:] += added[:, None]

    def merged(self) -> Array:
        first = total = self.streams[:, 0]
        for i, proj in enumerate(self.projections.unembd_proj, 1):
            total = total + as_long_as(first, self.backend.linear(self.streams[:, i], proj))
        return total * (1.0 / self.streams.shape[1])

    def _routed(self, x: Array, weights: AltUpWeights) -> Array:
        """A value for each stream: [tokens, S]."""
        logits = self.backend.linear(self.backend.norm(x, weights.router_norm), weights.router)
        return namespace(x).tanh(logits * (1.0 / x.shape[-1]))


def as_long_as(x: Array, z: Array) -> Array:
    """z [tokens, n], each row of it made as long as that of x."""
    return z * (_length(x) / _length(z))


def _products(x: Array, coefs: Array) -> Array:
    """x [tokens, S] times coefs [n, S] transposed."""
    return namespace(x).sum(x[:, None] * coefs, axis=-1)


def _length(x: Array) -> Array:
    xp = namespace(x)
    return xp.sqrt(xp.clip(xp.sum(x * x, axis=-1, keepdims=True), SMALLEST, None))


def _altup(layer: LayerWeights) -> AltUpWeights:
    assert layer.altup is not None
    return layer.altup
