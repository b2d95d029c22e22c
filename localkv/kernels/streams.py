"""The residual stream between layers: one, or several that AltUp keeps, and what is added to it.

A learned residual of low rank (`LaurelSpec`) stands beside a mixer, and rows of per-layer
embeddings (`PerLayerInputSpec`) are read by layers. Of AltUp's streams (`AltUpSpec`) a layer works
on one, after llama.cpp's `src/models/gemma3n.cpp`. They are [tokens, S, n_embd], so that a token's
result is the same alone as in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import LayerSpec
from localkv.cache.arrays import Array
from localkv.kernels.activation import activated
from localkv.kernels.backend import Backend, scaled
from localkv.kernels.layer_weights import (
    AltUpProjections,
    AltUpWeights,
    LayerWeights,
    Linear,
    Norm,
    PerLayerTable,
)
from localkv.kernels.namespace import namespace
from localkv.kernels.places import moved


class Streams(Protocol):
    """What layers read, and what becomes of their output."""

    def enter(self, layer: LayerWeights) -> Array:
        """What the layer works on: [tokens, n_embd]."""
        ...

    def keep(self, rows: Array) -> None:
        """Go on with some tokens only."""
        ...

    def leave(self, x: Array, layer: LayerWeights, spec: LayerSpec, row: Array | None) -> None:
        """Take the layer's output.

        Args:
            row: [tokens, P], the layer's embeddings of the tokens, or None.
        """
        ...

    def merged(self) -> Array:
        """[tokens, n_embd] after all layers."""
        ...

    def move(self, target: Backend) -> None:
        """Go on at another place."""
        ...


class OneStream:
    """The plain residual stream."""

    def __init__(self, x: Array, backend: Backend) -> None:
        self.x = x
        self.backend = backend

    def enter(self, layer: LayerWeights) -> Array:
        return self.x

    def keep(self, rows: Array) -> None:
        """Nothing but the layer's output goes on."""

    def leave(self, x: Array, layer: LayerWeights, spec: LayerSpec, row: Array | None) -> None:
        if row is not None:
            x = self.backend.add_layer_input(x, row, layer, spec)
        self.x = scaled(x, layer.output_scale)

    def merged(self) -> Array:
        return self.x

    def move(self, target: Backend) -> None:
        self.x, self.backend = moved(self.x, self.backend, target), target


def with_laurel(backend: Backend, x: Array, layer_input: Array, layer: LayerWeights) -> Array:
    """(x + n + norm(laurel_r laurel_l n)) / sqrt(2), with n the normed input of the mixer.

    Args:
        x: [tokens, n_embd], after the mixer.
        layer_input: before it.
    """
    weights = layer.laurel
    assert weights is not None
    assert layer.attn_norm is not None
    n = backend.norm(layer_input, layer.attn_norm)
    low = backend.linear(backend.linear(n, weights.laurel_l), weights.laurel_r)
    return (x + n + backend.norm(low, weights.post_norm)) * math.sqrt(0.5)


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

    def move(self, target: Backend) -> None:
        self.streams, self.backend = moved(self.streams, self.backend, target), target

    def _routed(self, x: Array, weights: AltUpWeights) -> Array:
        """A value for each stream: [tokens, S]."""
        logits = self.backend.linear(self.backend.norm(x, weights.router_norm), weights.router)
        return namespace(x).tanh(logits * (1.0 / x.shape[-1]))


def as_long_as(x: Array, z: Array) -> Array:
    """z [tokens, n], each row of it made as long as x's."""
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
