"""Parts of layers for tests of single operations."""

from __future__ import annotations

from torch import Tensor

from localkv.arch.spec import (
    AttentionParams,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
)
from localkv.kernels.layer_weights import Norm


def rms(weight: Tensor, eps: float = 1e-5) -> Norm:
    """RMSNorm with these weights."""
    return Norm(NormSpec("norm", "rms", eps), weight)


def layer_norm(weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Norm:
    """LayerNorm with these weights."""
    return Norm(NormSpec("norm", "layer", eps), weight, bias)


def layer_spec(ffn: MlpSpec | MoeSpec) -> LayerSpec:
    """A plain layer with one head."""
    norm = NormSpec("norm", "rms", 1e-5)
    return LayerSpec(AttentionSpec(1, 1, 64, 64, AttentionParams(0.125)), ffn, norm, norm)


def model_of(n_embd: int, n_vocab: int) -> ModelSpec:
    """A plain model of one layer."""
    layer = layer_spec(MlpSpec(n_embd))
    return ModelSpec("llama", "", n_embd, n_vocab, 512, (layer,), NormSpec("norm", "rms", 0.0))
