"""TRITON: float32 activations, packed weights, a packed cache, and kernels that fuse.

Everything but attention and what happens to q, k and v between their projection and it, which
`triton_backend` is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from localkv.config import ModelConfig, MoeConfig
from localkv.kernels.backend import Backend, TokenInputs
from localkv.kernels.gpu.embedding import embed
from localkv.kernels.gpu.moe import moe_mlp
from localkv.kernels.gpu.plane_tensor import prepare
from localkv.kernels.gpu.products import gate_up, linears, normed
from localkv.kernels.gpu.rms_norm import rms_norm
from localkv.kernels.layer_weights import AttentionWeights, Linear, MlpWeights, MoeWeights
from localkv.kv_cache import Batch, LayerCache, SegmentBatch

StoreHeads = Callable[
    [
        Tensor,
        Tensor,
        Tensor,
        AttentionWeights,
        ModelConfig,
        TokenInputs,
        LayerCache,
        tuple[SegmentBatch, ...],
    ],
    Tensor,
]
"""(q, k, v, weights, config, inputs, cache, segments) -> q after its norm, RoPE and scaling.

q, k and v are float32 [tokens, heads, head_dim], as projected, contiguous. K and V of the tokens
are in their pages afterwards.
"""
Attention = Callable[[Tensor, LayerCache, Batch, float], Tensor]


def norm_qkv(
    x: Tensor, weights: AttentionWeights, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as projected, float32 [tokens, heads, head_dim]; two launches."""
    layers = (weights.attn_q, weights.attn_k, weights.attn_v)
    h = normed(x, weights.attn_norm, config.rms_eps, layers)
    q, k, v = (part.view(len(x), -1, config.head_dim) for part in linears(h, layers))
    return q, k, v


def out_residual(x: Tensor, attn: Tensor, attn_output: Linear) -> Tensor:
    """x + attn_output(attn), in one launch for one token."""
    return linears(attn, (attn_output,), residual=x)[0]


def mlp_residual(x: Tensor, ffn_norm: Tensor, mlp: MlpWeights, eps: float) -> Tensor:
    """x + down(silu(gate(h)) * up(h)), h the norm of x; three launches for one token."""
    h = normed(x, ffn_norm, eps, (mlp.ffn_gate, mlp.ffn_up))
    return linears(gate_up(h, mlp.ffn_gate, mlp.ffn_up), (mlp.ffn_down,), residual=x)[0]


def moe_residual(
    x: Tensor, ffn_norm: Tensor, layer: MoeWeights, moe: MoeConfig, eps: float
) -> Tensor:
    """x + the experts' output of the norm of x."""
    return moe_mlp(rms_norm(x, ffn_norm, eps), layer, moe, residual=x)


def logits(x: Tensor, output_norm: Tensor, output: Linear, eps: float) -> Tensor:
    """float32 [tokens, n_vocab], on the device."""
    return linears(normed(x, output_norm, eps, (output,)), (output,))[0]


def triton_backend(
    store_heads: StoreHeads,
    attention: Attention,
    *,
    device: torch.device,
    kernels: Mapping[str, str],
    head_dim_multiple: int = 1,
) -> Backend:
    """The backend on `device`, with the attention given.

    Args:
        kernels: what implements attention, for the start summary.
    """

    def norm_qkv_rope_store(
        x: Tensor,
        weights: AttentionWeights,
        config: ModelConfig,
        inputs: TokenInputs,
        cache: LayerCache,
        segments: tuple[SegmentBatch, ...],
    ) -> Tensor:
        q, k, v = norm_qkv(x, weights, config)
        return store_heads(q, k, v, weights, config, inputs, cache, segments)

    return Backend(
        name="cuda",
        device=device,
        dtype=torch.float32,
        embed=embed,
        norm_qkv_rope_store=norm_qkv_rope_store,
        attention=attention,
        out_residual=out_residual,
        mlp_residual=mlp_residual,
        moe_residual=moe_residual,
        logits=logits,
        prepare=lambda weight: prepare(weight, device),
        prepare_embedding=lambda weight: prepare(weight, device),
        kernels={**kernels, "linear": "packed weights, Triton; float32 or fp16 tensor cores"},
        head_dim_multiple=head_dim_multiple,
        compiles=True,
    )
