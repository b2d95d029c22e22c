"""Attention of grouped queries on a GPU: `kernels/grouped_attention.py` in few launches."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from localkv.arch.spec import AttentionSpec, LayerSpec
from localkv.cache.arrays import Batch, LayerCache
from localkv.kernels.attention import attention
from localkv.kernels.backend import TokenInputs
from localkv.kernels.gpu.attention.packed_attention import segment_attention
from localkv.kernels.gpu.attention.sizes import MOST_CHANNELS
from localkv.kernels.gpu.gate import gated
from localkv.kernels.gpu.gpu_info import GpuInfo
from localkv.kernels.gpu.group_store import pack_groups_gpu
from localkv.kernels.gpu.products.products import linears, normed
from localkv.kernels.gpu.rope_store import QueryKeySteps, rope_store, turn_queries
from localkv.kernels.gpu.rotate import rotate_gpu
from localkv.kernels.layer_weights import AttentionWeights, LayerWeights
from localkv.kernels.store_kv import pack_groups


def why_not(spec: AttentionSpec) -> str:
    """What attention has that no kernel does, in words; empty if there is nothing."""
    most = max(spec.key_dim, spec.value_dim)
    if most > MOST_CHANNELS:
        return f"heads of {most} channels, of {MOST_CHANNELS} at most"
    norms = [norm for norm in (spec.q_norm, spec.k_norm, spec.v_norm) if norm is not None]
    if len({norm.eps for norm in norms}) > 1:
        return "norms of q, k and v with several eps"
    if len({(norm.kind, norm.span) for norm in (spec.q_norm, spec.k_norm) if norm}) > 1:
        return "norms of q and k of several kinds"
    if spec.norms_after_rope and any(norm.span == "row" for norm in norms):
        return "norms of all heads after RoPE"
    if spec.v_norm is not None and (spec.v_norm.kind, spec.v_norm.span) != ("rms", "head"):
        return "norms of V other than RMS norms of heads"
    return ""


def grouped_attention(
    gpu: GpuInfo,
    x: Tensor,
    layer: LayerWeights,
    spec: LayerSpec,
    inputs: TokenInputs,
    cache: LayerCache,
    batch: Batch,
) -> Tensor:
    """As `Backend.mixers` has it; five launches for one segment, and a sixth for a gate; more for a
    sink and a tail."""
    weights, attn = layer.attention, spec.attention
    projections = [p for p in (weights.attn_q, weights.attn_k, weights.attn_v) if p is not None]
    q, *kv = linears(normed(x, layer.attn_norm, projections), projections)
    q, gate = _heads_and_gate(q, attn)
    steps = _steps(weights, attn, inputs)
    if attn.kv_from is not None:
        q = turn_queries(q, steps)
    else:
        k = kv[0].view(len(x), attn.n_kv_heads, attn.key_dim)
        v = k if attn.value_from_key else kv[1].view(len(x), attn.n_kv_heads, attn.value_dim)
        q = rope_store(q, k, v, steps, cache, cache.rows_of(batch))
        pack_groups(pack_groups_gpu, cache, cache.rows_of(batch))
    sinks = weights.sinks
    run = partial(segment_attention, gpu)
    if len(cache.segments) == 1:  # nothing is merged, so the kernels take the sinks
        run, sinks = partial(run, sinks=sinks), None
    out: Tensor = attention(run, q, cache, batch, attn.params, sinks, rotate=rotate_gpu)
    return (out if gate is None else gated(out, gate)).flatten(1)


def _heads_and_gate(q: Tensor, attn: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """q [tokens, heads, channels], and the gate of each value of the output, if there is one."""
    if not attn.gated:
        return q.view(len(q), attn.n_heads, attn.key_dim), None
    both = q.view(len(q), attn.n_heads, 2, attn.key_dim)
    return both[:, :, 0], both[:, :, 1]


def _steps(weights: AttentionWeights, attn: AttentionSpec, inputs: TokenInputs) -> QueryKeySteps:
    return QueryKeySteps(
        weights.attn_q_norm,
        weights.attn_k_norm,
        inputs.rope,
        inputs.q_scale,
        attn.norms_after_rope,
        weights.v_norm,
    )
