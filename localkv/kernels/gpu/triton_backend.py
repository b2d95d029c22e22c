"""TRITON: float32 activations, packed weights, a packed cache, and kernels that fuse."""

from __future__ import annotations

from functools import partial

import torch

from localkv.arch.spec import (
    AttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    MlpAndMoeSpec,
    MlpSpec,
    MoeSpec,
)
from localkv.kernels.backend import Backend, Method, Methods, scaled
from localkv.kernels.gpu import feed_forward
from localkv.kernels.gpu import grouped_attention as grouped
from localkv.kernels.gpu.attention import latents
from localkv.kernels.gpu.attention.packed_attention import product_of
from localkv.kernels.gpu.device import CudaMemory, start_triton
from localkv.kernels.gpu.device_draw import device_draw
from localkv.kernels.gpu.embedding import embed
from localkv.kernels.gpu.footprint import MANY_TOKENS
from localkv.kernels.gpu.group_store import repack_page_gpu
from localkv.kernels.gpu.launch import compile_together
from localkv.kernels.gpu.norm import norm
from localkv.kernels.gpu.products import epilogues
from localkv.kernels.gpu.products.epilogues import GATED
from localkv.kernels.gpu.products.plane_tensor import prepare
from localkv.kernels.gpu.products.products import planes_of
from localkv.kernels.gpu.products.tile_sizes import gpu_of
from localkv.kernels.gpu.scan import scan
from localkv.kernels.recurrent import Recurrence, recurrent_mixers
from localkv.kernels.reference.torch_arrays import TorchArrays
from localkv.quant_formats.packed_tensor import PackedTensor

TILES = {
    "fp16": "fp16",
    "tf32": "tf32 (10 bits of mantissa, which hold bf16's 7)",
    "tf32x3": "tf32 in three products (nearly float32)",
}
"""The form in which attention multiplies rows of a cache type."""

MANY = f"from {MANY_TOKENS} tokens on decoded to fp16 for cuBLAS"
"""What products say of prompts."""


def product_method(weight: PackedTensor) -> Method:
    """How a prepared matrix is multiplied."""
    if planes_of(weight).layout.is_exact:
        return Method("Triton on packed weights, float32")
    if weight.halves_activations:
        return Method(f"Triton on packed weights, activations in fp16, float32 sums; {MANY}")
    return Method(
        f"Triton on packed weights; one token float32, more fp16 with float32 sums; {MANY}"
    )


METHODS = Methods(
    attention=Method("Triton on packed K and V, float32 sums; decoding splits the context"),
    tiles=lambda fmt, side: Method(TILES[product_of(fmt)]),
    store=lambda fmt: Method("Triton, with norm, RoPE and rotation"),
    product=product_method,
    experts=lambda moe: Method("Triton on packed weights, routed on the GPU"),
    others={
        "embedding": Method("Triton"),
        "norms": Method("Triton, float32; those behind a block with its residual"),
        "q, k, v": Method("one Triton product"),
        "decoding": Method(
            "recorded steps; tokens are drawn on the GPU where the samplers allow it"
        ),
    },
)
"""Each operation has a kernel for all types, so none has a slowdown."""


def lacks(layer: LayerSpec) -> str:
    """What the kernels can't do of a layer, in words; empty if there is nothing."""
    if isinstance(layer.mixer, AttentionSpec) and (reason := grouped.why_not(layer.mixer)):
        return reason
    if isinstance(layer.mixer, LatentAttentionSpec) and (reason := latents.why_not(layer.mixer)):
        return reason
    if layer.moe is not None and layer.moe.activation not in GATED:
        return f"experts with {layer.moe.activation}"
    blocks = (layer.mlp, layer.moe and layer.moe.expert, layer.moe and layer.moe.shared)
    return next(filter(None, (epilogues.why_not(block) for block in blocks if block)), "")


def triton_backend(device: torch.device | str = "cuda") -> Backend:
    """The backend of NVIDIA GPUs; of the CPU only in Triton's interpreter, for tests.

    Raises:
        LocalKVError: Triton can't build its driver's module.
    """
    device = torch.device(device)
    if device.type == "cuda":
        start_triton()
    gpu = gpu_of(device)

    def prepared(weight: PackedTensor) -> PackedTensor:
        return prepare(weight, device)

    return Backend(
        name="cuda",
        arrays=TorchArrays(device, repack=partial(repack_page_gpu, gpu)),
        embed=lambda ids, weight, factor: scaled(embed(ids, weight), factor),
        mixers={
            AttentionSpec: partial(grouped.grouped_attention, gpu),
            **recurrent_mixers(Recurrence(norm, feed_forward.linear, scan)),
            LatentAttentionSpec: partial(latents.latent_attention, gpu),
        },
        out_residual=feed_forward.out_residual,
        ffns={
            MlpSpec: feed_forward.mlp_residual,
            MoeSpec: feed_forward.moe_residual,
            MlpAndMoeSpec: feed_forward.both_residual,
        },
        logits=feed_forward.logits,
        norm=norm,
        linear=feed_forward.linear,
        add_layer_input=feed_forward.add_layer_input,
        prepare=prepared,
        prepare_embedding=prepared,
        hardware=gpu.name,
        memory=CudaMemory(device) if device.type == "cuda" else None,
        methods=METHODS,
        compiles=gpu.ptx,
        compile_together=compile_together if gpu.ptx else None,
        records=True,
        draw=device_draw,
        lacks=lacks,
    )
