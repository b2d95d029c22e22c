"""Where each part of a model is: layers, their feed-forward blocks, the embedding and the output.

A part is what moves as a whole. A *layer* is all of it but the feed-forward block, and its rows of
K and V; so with the block elsewhere (experts in the machine's memory) only hidden states move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from localkv.arch.spec import AttentionSpec

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec


@dataclass(frozen=True)
class Placement:
    """The places of a model's parts, as indices of `devices`.

    Attributes:
        devices: their names, each once: "cpu", "cuda0". Of a whole model each has a part.
        layers: of each layer, without its feed-forward block.
        blocks: of each layer's feed-forward block.
        embedding: of the embedding, and what is added to it.
        output: of the last norm and the output matrix.
    """

    devices: tuple[str, ...]
    layers: tuple[int, ...]
    blocks: tuple[int, ...]
    embedding: int = 0
    output: int = 0

    @classmethod
    def one(cls, device: str, n_layers: int) -> Placement:
        """All of a model in one place."""
        return cls((device,), (0,) * n_layers, (0,) * n_layers)

    @property
    def is_one(self) -> bool:
        """Whether there is one place for all parts."""
        return len(self.devices) == 1

    @cached_property
    def used(self) -> tuple[int, ...]:
        """The devices that have a part, in order."""
        return tuple(sorted({*self.layers, *self.blocks, self.embedding, self.output}))

    def first(self, n: int) -> Placement:
        """The placement of the model's first `n` layers."""
        return replace(self, layers=self.layers[:n], blocks=self.blocks[:n])

    def with_shared_rows(self, config: ModelSpec) -> Placement:
        """This placement, but with each layer that reads another's K and V where that layer is."""
        layers = list(self.layers)
        for i, layer in enumerate(config.layers):
            if isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv_from is not None:
                layers[i] = layers[layer.mixer.kv_from]
        return replace(self, layers=tuple(layers))
