"""The tensors of a layer's mixer."""

from __future__ import annotations

from dataclasses import replace

from localkv.arch.spec import (
    AttentionSpec,
    DeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    Mixer,
    ShortConvSpec,
)
from localkv.kernels.layer_weights import AttentionWeights, Linear, MixerWeights
from localkv.loader.latent_weights import latent_weights
from localkv.loader.recurrent_weights import recurrent_weights
from localkv.loader.tensor_reader import TensorReader


def mixer_weights(read: TensorReader, spec: Mixer, n_embd: int, at: str) -> MixerWeights:
    """Those of the layer whose tensors' names begin with `at`.

    Raises:
        ModelFileError: one is missing, or of the wrong shape or type.
    """
    match spec:
        case AttentionSpec():
            return _attention(read, spec, n_embd, at)
        case LatentAttentionSpec():
            return latent_weights(read, spec, n_embd, at)
        case DeltaNetSpec() | ShortConvSpec() | Mamba2Spec():
            return recurrent_weights(read, spec, n_embd, at)


def _attention(read: TensorReader, spec: AttentionSpec, n_embd: int, at: str) -> AttentionWeights:
    attn_q, attn_k, attn_v = _qkv(read, spec, n_embd, at)
    q_norm, k_norm, v_norm, sinks = spec.q_norm, spec.k_norm, spec.v_norm, spec.sinks
    n_kv_heads, stores = spec.n_kv_heads, spec.kv_from is None
    return AttentionWeights(
        attn_q=attn_q,
        attn_k=attn_k,
        attn_v=attn_v,
        output=read.linear(f"{at}attn_output", n_embd, spec.width),
        attn_q_norm=read.head_norm(q_norm, spec.n_heads, spec.key_dim, at) if q_norm else None,
        attn_k_norm=read.head_norm(k_norm, n_kv_heads, spec.key_dim, at)
        if k_norm and stores
        else None,
        v_norm=read.head_norm(v_norm, n_kv_heads, spec.value_dim, at)
        if v_norm and stores
        else None,
        sinks=None if sinks is None else read.vector(f"{at}{sinks}.weight", spec.n_heads),
    )


def _qkv(
    read: TensorReader, spec: AttentionSpec, n_embd: int, at: str
) -> tuple[Linear, Linear | None, Linear | None]:
    """Projections of q, K and V, from one tensor or from several."""
    n_q = spec.n_heads * spec.key_dim * (2 if spec.gated else 1)
    n_k, n_v = spec.n_kv_heads * spec.key_dim, spec.n_kv_heads * spec.value_dim
    bias = spec.qkv_bias
    if spec.kv_from is None and read.has(f"{at}attn_qkv.weight"):
        apart = read.has(f"{at}attn_q.bias")
        attn_q, attn_k, attn_v = read.fused_linear(
            f"{at}attn_qkv", (n_q, n_k, n_v), n_embd, bias_required=bias and not apart
        )
        if not apart:
            return attn_q, attn_k, attn_v
        return (
            replace(attn_q, bias=read.vector(f"{at}attn_q.bias", n_q)),
            replace(attn_k, bias=read.vector(f"{at}attn_k.bias", n_k)),
            replace(attn_v, bias=read.vector(f"{at}attn_v.bias", n_v)),
        )

    def linear(name: str, n_out: int) -> Linear:
        return read.linear(f"{at}{name}", n_out, n_embd, bias_required=bias)

    stores = spec.kv_from is None
    return (
        _gated_q(read, spec, n_embd, at) if spec.gated else linear("attn_q", n_q),
        linear("attn_k", n_k) if stores else None,
        linear("attn_v", n_v) if stores and not spec.value_from_key else None,
    )


def _gated_q(read: TensorReader, spec: AttentionSpec, n_embd: int, at: str) -> Linear:
    """Of each head q, then its gate, which a file may have as a tensor of its own."""
    if not read.has(f"{at}attn_gate.weight"):
        n_q = 2 * spec.n_heads * spec.key_dim
        return read.linear(f"{at}attn_q", n_q, n_embd, bias_required=spec.qkv_bias)
    names = (f"{at}attn_q", f"{at}attn_gate")
    return read.interleaved(names, spec.n_heads, spec.key_dim, n_embd)
