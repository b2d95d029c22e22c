"""TRITON: float32 activations, packed weights, a packed cache, and kernels that fuse."""

from __future__ import annotations

import torch
from torch import Tensor

from localkv.cache.kv_cache import Batch, LayerCache, SegmentBatch
from localkv.config import AttentionParams, ModelConfig, MoeConfig
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.attention import attention
from localkv.kernels.backend import Backend, TokenInputs
from localkv.kernels.gpu.attention.packed_attention import PackedAttention, product_of
from localkv.kernels.gpu.driver import start_triton
from localkv.kernels.gpu.embedding import embed
from localkv.kernels.gpu.launch import compile_together
from localkv.kernels.gpu.moe.experts import moe_mlp
from localkv.kernels.gpu.products.plane_tensor import prepare
from localkv.kernels.gpu.products.products import gate_up, linears, normed, planes_of
from localkv.kernels.gpu.products.tile_sizes import gpu_of
from localkv.kernels.gpu.rms_norm import rms_norm
from localkv.kernels.gpu.rope_store import QueryKeySteps, rope_store
from localkv.kernels.gpu.rotate import rotate_gpu
from localkv.kernels.layer_weights import AttentionWeights, Linear, MlpWeights, MoeWeights
from localkv.kernels.method import Method, Methods

TILES = {
    "fp16": "fp16",
    "tf32": "tf32 (10 bits of mantissa, which hold bf16's 7)",
    "tf32x3": "tf32 in three products (nearly float32)",
}
"""The form in which attention multiplies rows of a cache type."""


def product_method(weight: PackedTensor) -> Method:
    """How a prepared matrix is multiplied."""
    if planes_of(weight).layout.is_exact:
        return Method("Triton on packed weights, float32")
    if weight.halves_activations:
        return Method("Triton on packed weights, activations in fp16, float32 sums")
    return Method("Triton on packed weights; one token float32, more fp16 with float32 sums")


METHODS = Methods(
    attention=Method(
        "Triton on packed K and V, float32 sums; decoding splits the context",
    ),
    tiles=lambda fmt, side: Method(TILES[product_of(fmt)]),
    store=lambda fmt: Method("Triton, with norm, RoPE and rotation"),
    product=product_method,
    experts=Method("Triton on packed weights, routed on the GPU"),
    others={
        "embedding": Method("Triton"),
        "norms": Method("Triton, float32"),
        "q, k, v": Method("one Triton product"),
        "decoding": Method(
            "recorded steps; tokens are drawn on the GPU where the samplers allow it"
        ),
    },
)
"""Each operation has a kernel for all types, so none has a slowdown."""


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


def norm_qkv_rope_store(
    x: Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    inputs: TokenInputs,
    cache: LayerCache,
    segments: tuple[SegmentBatch, ...],
) -> Tensor:
    """q after RoPE, float32; three launches for one segment."""
    q, k, v = norm_qkv(x, weights, config)
    steps = QueryKeySteps(
        weights.attn_q_norm, weights.attn_k_norm, config.rms_eps, inputs.rope, inputs.q_scale
    )
    return rope_store(q, k, v, steps, cache, segments)


def triton_backend(device: torch.device | str = "cuda") -> Backend:
    """The backend of NVIDIA GPUs; of the CPU only in Triton's interpreter, for tests.

    Raises:
        LocalKVError: Triton can't build its driver's module.
    """
    device = torch.device(device)
    if device.type == "cuda":
        start_triton()
    packed = PackedAttention(gpu_of(device))

    def run_attention(
        q: Tensor, cache: LayerCache, batch: Batch, params: AttentionParams
    ) -> Tensor:
        return attention(packed, q, cache, batch, params, rotate_gpu).flatten(1)

    return Backend(
        name="cuda",
        device=device,
        dtype=torch.float32,
        embed=embed,
        norm_qkv_rope_store=norm_qkv_rope_store,
        attention=run_attention,
        out_residual=out_residual,
        mlp_residual=mlp_residual,
        moe_residual=moe_residual,
        logits=logits,
        prepare=lambda weight: prepare(weight, device),
        prepare_embedding=lambda weight: prepare(weight, device),
        hardware=gpu_of(device).name,
        methods=METHODS,
        compiles=packed.gpu.ptx,
        compile_together=compile_together if packed.gpu.ptx else None,
        records=True,
    )
