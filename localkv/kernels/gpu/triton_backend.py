"""TRITON: float32 activations, packed weights, a packed cache, and kernels that fuse."""

from __future__ import annotations

import torch
from torch import Tensor

from localkv.arch.ffn_spec import MlpSpec, MoeSpec
from localkv.arch.mixer_spec import AttentionSpec
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.cache.kv_cache import Batch, LayerCache, SegmentBatch
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.attention import attention
from localkv.kernels.backend import Backend, TokenInputs, capped_logits, scaled
from localkv.kernels.gpu.attention.packed_attention import PackedAttention, product_of
from localkv.kernels.gpu.device_draw import device_draw
from localkv.kernels.gpu.driver import start_triton
from localkv.kernels.gpu.embedding import embed
from localkv.kernels.gpu.launch import compile_together
from localkv.kernels.gpu.memory import CudaMemory
from localkv.kernels.gpu.moe.experts import moe_mlp
from localkv.kernels.gpu.norm import norm
from localkv.kernels.gpu.products.activations import Activations
from localkv.kernels.gpu.products.plane_tensor import prepare
from localkv.kernels.gpu.products.products import gate_up, linears, normed, planes_of
from localkv.kernels.gpu.products.tile_sizes import gpu_of
from localkv.kernels.gpu.rope_store import QueryKeySteps, rope_store
from localkv.kernels.gpu.rotate import rotate_gpu
from localkv.kernels.layer_weights import LayerWeights, Linear, MlpWeights, MoeWeights, Norm
from localkv.kernels.method import Method, Methods
from localkv.kernels.per_layer_input import layer_input
from localkv.kernels.reference.torch_arrays import TorchArrays

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


def norm_qkv(x: Tensor, layer: LayerWeights, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as projected, float32 [tokens, heads, channels]; two launches."""
    weights = layer.attention
    assert weights.attn_k is not None
    assert weights.attn_v is not None
    layers = (weights.attn_q, weights.attn_k, weights.attn_v)
    q, k, v = linears(normed(x, layer.attn_norm, layers), layers)
    return (
        q.view(len(x), -1, spec.key_dim),
        k.view(len(x), -1, spec.key_dim),
        v.view(len(x), -1, spec.value_dim),
    )


def added(
    x: Tensor,
    source: Tensor | Activations,
    last: Linear,
    post_norm: Norm | None,
    spec: LayerSpec,
) -> Tensor:
    """x + last(source), in one launch for one token, unless a norm or a factor comes between."""
    if post_norm is None and spec.residual_scale == 1.0:
        return linears(source, (last,), residual=x)[0]
    return with_rest(x, linears(source, (last,))[0], post_norm, spec)


def with_rest(x: Tensor, y: Tensor, post_norm: Norm | None, spec: LayerSpec) -> Tensor:
    """x + y, normed and scaled as the layer says."""
    rest: Tensor = scaled(y if post_norm is None else norm(y, post_norm), spec.residual_scale)
    return x + rest


def out_residual(x: Tensor, mixed: Tensor, layer: LayerWeights, spec: LayerSpec) -> Tensor:
    """x + the mixer's output matrix times what it mixed."""
    assert layer.mixer is not None
    return added(x, mixed, layer.mixer.output, layer.post_attn_norm, spec)


def mlp_residual(x: Tensor, layer_input: Tensor, layer: LayerWeights, spec: LayerSpec) -> Tensor:
    """x + down(activation(gate(h)) * up(h)), h a norm; three launches for a token."""
    mlp, ffn = layer.ffn, spec.ffn
    assert isinstance(mlp, MlpWeights)
    assert isinstance(ffn, MlpSpec)
    assert mlp.ffn_gate is not None
    source = layer_input if spec.parallel else x
    h = normed(source, layer.ffn_norm, (mlp.ffn_gate, mlp.ffn_up))
    hidden = gate_up(h, mlp.ffn_gate, mlp.ffn_up, ffn.activation)
    return added(x, hidden, mlp.ffn_down, layer.post_ffn_norm, spec)


def moe_residual(x: Tensor, layer_input: Tensor, layer: LayerWeights, spec: LayerSpec) -> Tensor:
    """x + the experts' output of a norm."""
    assert isinstance(layer.ffn, MoeWeights)
    assert isinstance(spec.ffn, MoeSpec)
    source = layer_input if spec.parallel else x
    h = source if layer.ffn_norm is None else norm(source, layer.ffn_norm)
    routed = layer_input if spec.ffn.router_reads_input else None
    if layer.post_ffn_norm is None and spec.residual_scale == 1.0:
        return moe_mlp(h, layer.ffn, spec.ffn, routed, residual=x)
    return with_rest(x, moe_mlp(h, layer.ffn, spec.ffn, routed), layer.post_ffn_norm, spec)


def linear(x: Tensor, layer: Linear) -> Tensor:
    """x [tokens, n_in] -> [tokens, n_out]."""
    return linears(x.contiguous(), (layer,))[0]


def logits(x: Tensor, output_norm: Norm, output: Linear, spec: ModelSpec) -> Tensor:
    """float32 [tokens, n_vocab], on the device."""
    y = linears(normed(x, output_norm, (output,)), (output,))[0]
    out: Tensor = capped_logits(y, spec)
    return out


def norm_qkv_rope_store(
    x: Tensor,
    layer: LayerWeights,
    spec: LayerSpec,
    inputs: TokenInputs,
    cache: LayerCache,
    segments: tuple[SegmentBatch, ...],
) -> Tensor:
    """q after RoPE, float32; three launches for one segment."""
    q, k, v = norm_qkv(x, layer, spec.attention)
    weights = layer.attention
    steps = QueryKeySteps(weights.attn_q_norm, weights.attn_k_norm, inputs.rope, inputs.q_scale)
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

    def grouped_attention(
        x: Tensor,
        layer: LayerWeights,
        spec: LayerSpec,
        inputs: TokenInputs,
        cache: LayerCache,
        batch: Batch,
    ) -> Tensor:
        q = norm_qkv_rope_store(x, layer, spec, inputs, cache, cache.rows_of(batch))
        params, sinks = spec.attention.params, layer.attention.sinks
        out: Tensor = attention(packed, q, cache, batch, params, sinks, rotate=rotate_gpu)
        return out.flatten(1)

    return Backend(
        name="cuda",
        arrays=TorchArrays(device),
        embed=lambda ids, weight, factor: scaled(embed(ids, weight), factor),
        mixers={AttentionSpec: grouped_attention},
        out_residual=out_residual,
        ffns={MlpSpec: mlp_residual, MoeSpec: moe_residual},
        logits=logits,
        norm=norm,
        linear=linear,
        add_layer_input=lambda x, row, layer, spec: x + layer_input(x, row, layer, linear, norm),
        prepare=lambda weight: prepare(weight, device),
        prepare_embedding=lambda weight: prepare(weight, device),
        hardware=gpu_of(device).name,
        memory=CudaMemory(device) if device.type == "cuda" else None,
        methods=METHODS,
        compiles=packed.gpu.ptx,
        compile_together=compile_together if packed.gpu.ptx else None,
        records=True,
        draw=device_draw,
    )
