"""What a backend is: one frozen table of functions, at the grain at which kernels fuse.

The forward pass calls nothing else. A backend that does not fuse composes its functions from
primitives (`compose`); one that does replaces entries of the table, and falls back on the composed
ones where a kernel is missing: `methods` says where, and what that costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localkv.arch.spec import Activation, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from localkv.cache.kv_cache import Batch, LayerCache, SegmentBatch
from localkv.config import CacheConfig
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.activation import gated
from localkv.kernels.attention import Rotate, SegmentAttention, attention, attention_reference
from localkv.kernels.embedding import embed
from localkv.kernels.hadamard import hadamard_transform
from localkv.kernels.layer_weights import LayerWeights, Linear, MlpWeights, MoeWeights, Norm
from localkv.kernels.linear import linear
from localkv.kernels.method import Methods
from localkv.kernels.moe import moe_mlp
from localkv.kernels.norm import norm
from localkv.kernels.rope import RopeTable, apply_rope
from localkv.kernels.store_kv import StoreKV, store_kv, store_rotated
from localkv.kernels.torch_arrays import TorchArrays
from localkv.system.turns import Turns


@dataclass(frozen=True)
class TokenInputs:
    """What attention needs to know of a batch's tokens in one layer.

    Attributes:
        rope: rotations of q and k, or None in a layer without RoPE.
        q_scale: [tokens] factor on q that grows with the position, or None.
    """

    rope: RopeTable | None
    q_scale: Tensor | None


def as_in_file(weight: PackedTensor) -> PackedTensor:
    """What backends that read the file's own layout prepare."""
    return weight


def nothing_ahead(
    matrix_types: Iterable[str], config: ModelSpec, cache: CacheConfig
) -> AbstractContextManager[None]:
    """What backends do that compile everything when it is first used."""
    return nullcontext()


@dataclass(frozen=True)
class Backend:
    """The operations of the forward pass; x is [tokens, n_embd] in `dtype` throughout.

    Attributes:
        name: as `--device` and the start summary show it.
        device, dtype: where activations live, and their type.
        embed: (token_ids, token_embd, scale) -> x, rows of the embedding times a factor.
        norm_qkv_rope_store: (x, layer, spec, inputs, cache, segments) -> q
            [tokens, n_heads, key_dim], never rotated; K and V of the tokens are in their pages
            afterwards, rotated where their segment says so.
        attention: (q, cache, batch, layer, spec) -> [tokens, n_heads * value_dim].
        out_residual: (x, attention output, layer, spec) -> x + what the layer's attention adds.
        mlp_residual, moe_residual: (x, source, layer, spec) -> x + what the feed-forward block
            makes of `source`, which is x itself unless the layer is parallel.
        logits: (x, output_norm, output, spec of the model) -> float32 [tokens, n_vocab].
        norm: (x, output_norm) -> x normed, for those who want the hidden states themselves.
        prepare: a matrix or a stack of them, as a view of the file -> as the products want it.
        prepare_embedding: the same for `embed`; if its result no longer reads the file's rows, a
            model whose output matrix is its embedding shares it.
        hardware: the GPU, for the start summary; empty on a CPU.
        methods: how operations are carried out, for the start summary and for what is slow.
        head_dim_multiple: what the size of a head must be a multiple of.
        compiles: kernels are compiled when they are first used, so a model is warmed up at load.
        compiling_ahead: (weight types of matrices, model, cache) -> a context to load the model and
            to warm it up in: meanwhile other cores compile what this will need.
        compile_together: runs a function that launches kernels, and compiles these at the same time
            instead of running them; None if kernels are not compiled so.
        records: launches read all that changes from the device's memory, so that those of a token
            can be recorded and repeated.
        turns: one thread at a time runs the operations: they share scratch memory and more.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    embed: Callable[[Tensor, PackedTensor, float], Tensor]
    norm_qkv_rope_store: Callable[
        [Tensor, LayerWeights, LayerSpec, TokenInputs, LayerCache, tuple[SegmentBatch, ...]],
        Tensor,
    ]
    attention: Callable[[Tensor, LayerCache, Batch, LayerWeights, LayerSpec], Tensor]
    out_residual: Callable[[Tensor, Tensor, LayerWeights, LayerSpec], Tensor]
    mlp_residual: Callable[[Tensor, Tensor, LayerWeights, LayerSpec], Tensor]
    moe_residual: Callable[[Tensor, Tensor, LayerWeights, LayerSpec], Tensor]
    logits: Callable[[Tensor, Norm, Linear, ModelSpec], Tensor]
    norm: Callable[[Tensor, Norm], Tensor]
    prepare: Callable[[PackedTensor], PackedTensor]
    methods: Methods
    prepare_embedding: Callable[[PackedTensor], PackedTensor] = as_in_file
    hardware: str = ""
    head_dim_multiple: int = 1
    compiles: bool = False
    compiling_ahead: Callable[
        [Iterable[str], ModelSpec, CacheConfig], AbstractContextManager[None]
    ] = nothing_ahead
    compile_together: Callable[[Callable[[], None]], None] | None = None
    records: bool = False
    turns: Turns = field(default_factory=Turns)

    @property
    def arrays(self) -> TorchArrays:
        """What the cache and the engine make arrays with."""
        return TorchArrays(self.device)


@dataclass(frozen=True)
class Primitives:
    """The pieces that `compose` builds a backend from; the defaults are the plain references."""

    embed: Callable[[Tensor, PackedTensor, torch.dtype], Tensor] = embed
    norm: Callable[[Tensor, Norm], Tensor] = norm
    linear: Callable[[Tensor, Linear], Tensor] = linear
    apply_rope: Callable[[Tensor, RopeTable], Tensor] = apply_rope
    store_kv: StoreKV = store_kv
    attention: SegmentAttention = attention_reference
    rotate: Rotate = hadamard_transform
    gated: Callable[[Tensor, Tensor, Activation], Tensor] = gated
    moe_mlp: Callable[[Tensor, MoeWeights, MoeSpec], Tensor] = moe_mlp
    prepare: Callable[[PackedTensor], PackedTensor] = as_in_file


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a number, and x itself for 1."""
    return x if factor == 1.0 else x * factor


def capped_logits(logits: Tensor, spec: ModelSpec) -> Tensor:
    """Logits as the model scales and caps them."""
    logits = scaled(logits, spec.logit_scale)
    cap = spec.logit_softcap
    return cap * torch.tanh(logits / cap) if cap else logits


def compose(
    name: str,
    p: Primitives,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    methods: Methods,
    head_dim_multiple: int = 1,
    compiles: bool = False,
) -> Backend:
    """A backend whose functions are put together from primitives, without fusion."""

    def normed(x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else p.norm(x, norm)

    def norm_qkv_rope_store(
        x: Tensor,
        layer: LayerWeights,
        spec: LayerSpec,
        inputs: TokenInputs,
        cache: LayerCache,
        segments: tuple[SegmentBatch, ...],
    ) -> Tensor:
        weights, attn = layer.attention, spec.attention
        h = normed(x, layer.attn_norm)
        q = p.linear(h, weights.attn_q).view(-1, attn.n_heads, attn.key_dim)
        k = p.linear(h, weights.attn_k).view(-1, attn.n_kv_heads, attn.key_dim)
        v = p.linear(h, weights.attn_v).view(-1, attn.n_kv_heads, attn.value_dim)
        q, k = normed(q, weights.attn_q_norm), normed(k, weights.attn_k_norm)
        if inputs.rope is not None:
            q, k = p.apply_rope(q, inputs.rope), p.apply_rope(k, inputs.rope)
        if inputs.q_scale is not None:
            q = q * inputs.q_scale[:, None, None]
        store_rotated(p.store_kv, k, v, cache, segments)
        return q

    def run_attention(
        q: Tensor, cache: LayerCache, batch: Batch, layer: LayerWeights, spec: LayerSpec
    ) -> Tensor:
        params, sinks = spec.attention.params, layer.attention.sinks
        return attention(p.attention, q, cache, batch, params, sinks, p.rotate).flatten(1)

    def residual(x: Tensor, y: Tensor, post_norm: Norm | None, spec: LayerSpec) -> Tensor:
        return x + scaled(normed(y, post_norm), spec.residual_scale)

    def out_residual(x: Tensor, attn: Tensor, layer: LayerWeights, spec: LayerSpec) -> Tensor:
        y = p.linear(attn, layer.attention.attn_output)
        return residual(x, y, layer.post_attn_norm, spec)

    def mlp_residual(x: Tensor, source: Tensor, layer: LayerWeights, spec: LayerSpec) -> Tensor:
        mlp, ffn = layer.ffn, spec.ffn
        assert isinstance(mlp, MlpWeights)
        assert isinstance(ffn, MlpSpec)
        h = normed(source, layer.ffn_norm)
        hidden = p.gated(p.linear(h, mlp.ffn_gate), p.linear(h, mlp.ffn_up), ffn.activation)
        return residual(x, p.linear(hidden, mlp.ffn_down), layer.post_ffn_norm, spec)

    def moe_residual(x: Tensor, source: Tensor, layer: LayerWeights, spec: LayerSpec) -> Tensor:
        assert isinstance(layer.ffn, MoeWeights)
        assert isinstance(spec.ffn, MoeSpec)
        y = p.moe_mlp(normed(source, layer.ffn_norm), layer.ffn, spec.ffn)
        return residual(x, y, layer.post_ffn_norm, spec)

    def logits(x: Tensor, output_norm: Norm, output: Linear, spec: ModelSpec) -> Tensor:
        return capped_logits(p.linear(p.norm(x, output_norm), output).float(), spec)

    return Backend(
        name=name,
        device=torch.device(device),
        dtype=dtype,
        embed=lambda ids, token_embd, scale: scaled(p.embed(ids, token_embd, dtype), scale),
        norm_qkv_rope_store=norm_qkv_rope_store,
        attention=run_attention,
        out_residual=out_residual,
        mlp_residual=mlp_residual,
        moe_residual=moe_residual,
        logits=logits,
        norm=p.norm,
        prepare=p.prepare,
        methods=methods,
        head_dim_multiple=head_dim_multiple,
        compiles=compiles,
    )
