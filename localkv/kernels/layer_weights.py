"""The weights of one layer, as the operations take them. Fields bear their GGUF tensors' names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from localkv.arch.spec import NormSpec
from localkv.cache.arrays import Array
from localkv.formats.packed_tensor import PackedTensor


@dataclass(frozen=True)
class Norm:
    """A norm and its weight: float32 [n], as its bias, which only LayerNorm may have."""

    spec: NormSpec
    weight: Array
    bias: Array | None = None


@dataclass(frozen=True)
class Linear:
    """y = x @ weight.T + bias; weight [n_out, n_in] packed, bias float32 [n_out] or None."""

    weight: PackedTensor
    bias: Array | None = None


@dataclass(frozen=True)
class AttentionWeights:
    """Norms of q and k are over each head; `sinks` are float32 [n_heads], a logit each."""

    attn_q: Linear
    attn_k: Linear
    attn_v: Linear
    attn_output: Linear
    attn_q_norm: Norm | None = None
    attn_k_norm: Norm | None = None
    sinks: Array | None = None


@dataclass(frozen=True)
class MlpWeights:
    """A gated feed-forward block: down(activation(gate(x)) * up(x))."""

    ffn_gate: Linear
    ffn_up: Linear
    ffn_down: Linear


@dataclass(frozen=True)
class MoeWeights:
    """Routed experts.

    Attributes:
        ffn_gate_inp: the router, [n_experts, n_embd].
        ffn_gate_exps, ffn_up_exps: packed [n_experts, n_ff, n_embd].
        ffn_down_exps: packed [n_experts, n_embd, n_ff].
        shared: an expert that sees every token, or None.
        ffn_gate_inp_shexp: float32 [n_embd], its sigmoid gate, or None.
    """

    ffn_gate_inp: Linear
    ffn_gate_exps: PackedTensor
    ffn_up_exps: PackedTensor
    ffn_down_exps: PackedTensor
    shared: MlpWeights | None = None
    ffn_gate_inp_shexp: Array | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One layer: attention, then a dense or a routed feed-forward block.

    Norms are None where `LayerSpec` has none.
    """

    attention: AttentionWeights
    ffn: MlpWeights | MoeWeights
    attn_norm: Norm | None
    ffn_norm: Norm | None
    post_attn_norm: Norm | None = None
    post_ffn_norm: Norm | None = None


def tensors_of(part: Any) -> Iterator[PackedTensor | Array]:
    """All tensors in a part of the weights, one that is there twice twice."""
    if isinstance(part, PackedTensor) or hasattr(part, "nbytes"):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from tensors_of(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from tensors_of(getattr(part, field.name))
