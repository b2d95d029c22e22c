"""The model's own weights for AltUp and per-layer embeddings, by their tensors' names."""

from __future__ import annotations

from dataclasses import dataclass

from localkv.kernels.layer_weights import Linear, Norm
from localkv.quant_formats.packed_tensor import PackedTensor


@dataclass(frozen=True)
class PerLayerTable:
    """Per-layer embeddings; P values for each of its L layers.

    Attributes:
        token_embd: `per_layer_token_embd` [n_vocab, L * P], as it lies in the mapped file: it may
            be the largest tensor, and only rows of tokens are read, by the host.
        model_proj: [L * P, n_embd].
        proj_norm: of P values.
    """

    token_embd: PackedTensor
    model_proj: Linear
    proj_norm: Norm


@dataclass(frozen=True)
class AltUpProjections:
    """AltUp's, both [n_embd, n_embd] for each stream but the first.

    Attributes:
        proj: make the streams of the embedding.
        unembd_proj: make them alike again, behind the last layer.
    """

    proj: tuple[Linear, ...]
    unembd_proj: tuple[Linear, ...]
