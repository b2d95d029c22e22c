"""What layers do with the residual stream besides a mixer and a block (Gemma 3n and 4)."""

from __future__ import annotations

from dataclasses import dataclass

from localkv.arch.norm_spec import NormSpec

PER_LAYER_ROWS = "per_layer_token_embd.weight"
"""Of this tensor, which may be a model's largest, only rows of tokens are read, by the host."""


@dataclass(frozen=True)
class PerLayerInputSpec:
    """Each layer has an embedding of its own, whose row it reads behind its feed-forward block.

    After llama.cpp's `src/models/gemma3n.cpp`; x0 is the scaled embedding, t a token, D its width.

    e = (norm(per_layer_model_proj x0 / sqrt(D)) + sqrt(P) per_layer_token_embd[t]) / sqrt(2), P
    values for each layer; a layer adds post_norm(proj (gelu(inp_gate x) * e)).

    Attributes:
        width: P.
        norm: the model's `per_layer_proj_norm`, of P values.
        post_norm: the layer's.
    """

    width: int
    norm: NormSpec
    post_norm: NormSpec


@dataclass(frozen=True)
class LaurelSpec:
    """A learned residual of low rank beside attention (Menghani et al. 2024, arXiv:2411.07501).

    n is the mixer's normed input: n + norm(laurel_r laurel_l n) joins the sum behind the mixer,
    which is divided by sqrt(2).

    Attributes:
        rank: rows of `laurel_l`.
        norm: `laurel_post_norm`.
    """

    rank: int
    norm: NormSpec


@dataclass(frozen=True)
class AltUpSpec:
    """Alternating updates of several residual streams (Baykal et al. 2023, arXiv:2301.13310).

    A layer works on the first stream as predicted from all, and corrects all by what it did.

    Attributes:
        n_streams: how many there are.
        router_norm: of what each layer's router reads.
    """

    n_streams: int
    router_norm: NormSpec
