"""Attention of grouped queries on a GPU: `kernels/attention_mixers.py` in few launches."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.arch.spec import AttentionSpec, GateActivation, LayerSpec
from localkv.cache.arrays import Batch, LayerCache
from localkv.kernels.attention import attention, pack_groups
from localkv.kernels.backend import TokenInputs
from localkv.kernels.gpu.attention.packed_attention import segment_attention
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.footprint import MOST_CHANNELS
from localkv.kernels.gpu.group_store import pack_groups_gpu, rotate_gpu
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.launch_bounds import check_rows
from localkv.kernels.gpu.products.epilogues import softplus
from localkv.kernels.gpu.products.products import linears, normed
from localkv.kernels.gpu.rope_store import QueryKeySteps, rope_store, turn_queries
from localkv.kernels.layer_weights import AttentionWeights, LayerWeights, Linear

ROWS = 8
"""Heads of a program."""


@triton.jit(do_not_specialize=["n_rows"])
def gate_kernel(
    x_ptr, gate_ptr, out_ptr, n_rows,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
    BY_HEAD: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """x times the sigmoid or the softplus of a gate, fp32 [n_rows, HEAD_DIM]; heads of the gate are
    STRIDE apart and have one value each if BY_HEAD, or else HEAD_DIM.

    Grid (blocks of ROWS heads).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    mask = (row < n_rows)[:, None] & (channel < HEAD_DIM)[None, :]
    at = row[:, None] * HEAD_DIM + channel[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if BY_HEAD:
        gate = tl.load(gate_ptr + row * STRIDE, mask=row < n_rows, other=0.0)[:, None]
    else:
        gate = tl.load(gate_ptr + row[:, None] * STRIDE + channel[None, :], mask=mask, other=0.0)
    if SOFTPLUS:
        y = x * softplus(gate)
    else:
        y = x / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + at, y, mask=mask)


def gated(x: Tensor, gate: Tensor, activation: GateActivation = "sigmoid") -> Tensor:
    """x [tokens, heads, channels] times the activation of a gate; float32.

    Args:
        gate: [tokens, heads, channels], or one channel for all of a head's; heads may be further
            apart.
    """
    n_tokens, n_heads, head_dim = x.shape
    by_head = gate.shape[2] != head_dim
    check_rows(gate, "a gate", n_tokens, n_heads, 1 if by_head else head_dim)
    x = x.contiguous()
    out = x.new_empty(x.shape)
    n_rows = n_tokens * n_heads
    launch(
        gate_kernel,
        (triton.cdiv(n_rows, ROWS),),
        x,
        gate,
        out,
        n_rows,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        STRIDE=gate.stride(1),
        ROWS=ROWS,
        BY_HEAD=by_head,
        SOFTPLUS=activation == "softplus",
        num_warps=4,
    )
    return out


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
    if spec.v_norm is not None and spec.value_dim < spec.key_dim:
        return "norms of heads of V that are narrower than K's"
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
    """Mix tokens by attention.

    It takes five launches for one segment, and a sixth for a gate of channels. It takes more for
    gates of heads, narrow heads of V, a factor, a sink and a tail.
    """
    weights, attn = layer.attention, spec.attention
    projections = [p for p in (weights.attn_q, weights.attn_k, weights.attn_v) if p is not None]
    q, *kv = linears(normed(x, layer.attn_norm, projections), projections)
    if attn.clamp:
        q, *kv = (part.clamp(-attn.clamp, attn.clamp) for part in (q, *kv))
    q, gate = _heads_and_gate(q, attn)
    steps = _steps(weights, attn, inputs)
    if attn.kv_from is not None:
        q = turn_queries(q, steps)
    else:
        k = kv[0].view(len(x), attn.n_kv_heads, attn.key_dim)
        v = k if attn.value_from_key else kv[1].view(len(x), attn.n_kv_heads, attn.value_dim)
        if attn.value_dim < attn.stored_value_dim:
            v = torch.nn.functional.pad(v, (0, attn.stored_value_dim - attn.value_dim))
        q = rope_store(q, k, v, steps, cache, cache.rows_of(batch))
        pack_groups(pack_groups_gpu, cache, cache.rows_of(batch))
    sinks = weights.sinks
    run = partial(segment_attention, gpu)
    if len(cache.segments) == 1:  # nothing is merged, so the kernels take the sinks
        run, sinks = partial(run, sinks=sinks), None
    out: Tensor = attention(run, q, cache, batch, attn.params, sinks, rotate=rotate_gpu)
    out = out[..., : attn.value_dim]
    if attn.output_scale != 1.0:
        out = out * attn.output_scale
    if weights.attn_gate is not None:
        gate = head_gate(x, layer, weights.attn_gate)
    return (out if gate is None else gated(out, gate, attn.gate_activation)).flatten(1)


def head_gate(x: Tensor, layer: LayerWeights, gate: Linear) -> Tensor:
    """A gate of each head [tokens, heads, 1], which reads the layer's normed rows."""
    return linears(normed(x, layer.attn_norm, (gate,)), (gate,))[0][:, :, None]


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
