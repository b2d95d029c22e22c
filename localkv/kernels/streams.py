"""The residual stream between layers: one, or several that AltUp keeps."""

from __future__ import annotations

from typing import Protocol

from localkv.arch.spec import LayerSpec
from localkv.cache.arrays import Array
from localkv.kernels.backend import Backend, scaled
from localkv.kernels.layer_weights import LayerWeights


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
        """[tokens, n_embd] behind all layers."""
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
