"""Latent attention on a GPU: `kernels/latent_attention.py` in few launches."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from localkv.arch.spec import LatentAttentionSpec, LayerSpec
from localkv.cache.arrays import Batch, LayerCache
from localkv.kernels.backend import TokenInputs
from localkv.kernels.gpu.attention.sizes import MOST_CHANNELS
from localkv.kernels.gpu.gpu_info import GpuInfo
from localkv.kernels.gpu.group_store import pack_groups_gpu
from localkv.kernels.gpu.latent.attention import segment_latents
from localkv.kernels.gpu.moe.experts import stack_products
from localkv.kernels.gpu.products.products import linears, normed
from localkv.kernels.gpu.rope_store import QueryKeySteps, store_rows, turn_queries
from localkv.kernels.gpu.rotate import rotate_gpu
from localkv.kernels.latent_attention import attend
from localkv.kernels.layer_weights import LatentAttentionWeights, LayerWeights
from localkv.kernels.store_kv import pack_groups
from localkv.quant_formats.packed_tensor import PackedTensor


def why_not(spec: LatentAttentionSpec) -> str:
    """What no kernel does, in words; empty if there is nothing."""
    if spec.latent_dim > MOST_CHANNELS:
        return f"latents of {spec.latent_dim} channels, of {MOST_CHANNELS} at most"
    return ""


def latent_attention(
    gpu: GpuInfo,
    x: Tensor,
    layer: LayerWeights,
    spec: LayerSpec,
    inputs: TokenInputs,
    cache: LayerCache,
    batch: Batch,
) -> Tensor:
    """As `Backend.mixers` has it; ten launches for one segment, with a latent of q; more for
    a sink and a tail."""
    weights, attn = layer.mixer, spec.mixer
    assert isinstance(weights, LatentAttentionWeights)
    assert isinstance(attn, LatentAttentionSpec)
    first = weights.attn_q if weights.attn_q_a is None else weights.attn_q_a
    projections = [first, weights.attn_kv_a_mqa]
    q, row = linears(normed(x, layer.attn_norm, projections), projections)
    if weights.attn_q_a is not None:
        (q,) = linears(normed(q, weights.attn_q_a_norm, [weights.attn_q]), [weights.attn_q])

    turns = QueryKeySteps(rope=inputs.rope)
    parts = row.view(len(x), 1, attn.latent_dim + attn.rope_dim)
    latent = parts[..., : attn.latent_dim].contiguous()
    rotated = turn_queries(parts[..., attn.latent_dim :], turns)
    norm = QueryKeySteps(k_norm=weights.attn_kv_a_norm)
    store_rows(latent, rotated, norm, cache, cache.rows_of(batch))
    pack_groups(pack_groups_gpu, cache, cache.rows_of(batch))

    heads = q.view(len(x), attn.n_heads, attn.nope_dim + attn.rope_dim)
    plain = heads[..., : attn.nope_dim]
    if inputs.q_scale is not None:
        plain = plain * inputs.q_scale[:, None, None]
    steps = QueryKeySteps(rope=inputs.rope, q_scale=inputs.q_scale)
    q_rotated = turn_queries(heads[..., attn.nope_dim :], steps)
    run = partial(segment_latents, gpu)
    absorbed = head_products(plain, weights.attn_k_b)
    out = attend(run, absorbed, q_rotated, cache, batch, attn.params, rotate=rotate_gpu)
    return head_products(out, weights.attn_v_b).flatten(1)


def head_products(x: Tensor, stack: PackedTensor) -> Tensor:
    """As `kernels.linear.head_products`: heads are the experts of their own rows."""
    n_tokens, n_heads, n_in = x.shape
    heads = torch.arange(n_heads, dtype=torch.int32, device=x.device).expand(n_tokens, -1)
    rows = x.reshape(-1, n_in)
    return stack_products(rows, heads.contiguous(), stack).view(n_tokens, n_heads, -1)
