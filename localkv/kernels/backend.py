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

from localkv.cache.kv_cache import Batch, LayerCache, SegmentBatch
from localkv.config import AttentionParams, CacheConfig, ModelConfig, MoeConfig
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.attention import Rotate, SegmentAttention, attention, attention_reference
from localkv.kernels.embedding import embed
from localkv.kernels.hadamard import hadamard_transform
from localkv.kernels.layer_weights import AttentionWeights, Linear, MlpWeights, MoeWeights
from localkv.kernels.linear import linear
from localkv.kernels.method import Methods
from localkv.kernels.moe import moe_mlp
from localkv.kernels.rms_norm import rms_norm
from localkv.kernels.rope import RopeTable, apply_rope
from localkv.kernels.store_kv import StoreKV, store_kv, store_rotated
from localkv.kernels.swiglu import swiglu
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
    matrix_types: Iterable[str], config: ModelConfig, cache: CacheConfig
) -> AbstractContextManager[None]:
    """What backends do that compile everything when it is first used."""
    return nullcontext()


@dataclass(frozen=True)
class Backend:
    """The operations of the forward pass; x is [tokens, n_embd] in `dtype` throughout.

    Attributes:
        name: as `--device` and the start summary show it.
        device, dtype: where activations live, and their type.
        embed: (token_ids, token_embd) -> x.
        norm_qkv_rope_store: (x, weights, config, inputs, cache, segments) -> q
            [tokens, n_heads, head_dim], never rotated; K and V of the tokens are in their pages
            afterwards, rotated where their segment says so.
        attention: (q, cache, batch, params) -> [tokens, n_heads * head_dim].
        out_residual: (x, attention output, attn_output) -> x.
        mlp_residual: (x, ffn_norm, weights, eps) -> x.
        moe_residual: (x, ffn_norm, weights, moe, eps) -> x.
        logits: (x, output_norm, output, eps) -> float32 [tokens, n_vocab].
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
    embed: Callable[[Tensor, PackedTensor], Tensor]
    norm_qkv_rope_store: Callable[
        [
            Tensor,
            AttentionWeights,
            ModelConfig,
            TokenInputs,
            LayerCache,
            tuple[SegmentBatch, ...],
        ],
        Tensor,
    ]
    attention: Callable[[Tensor, LayerCache, Batch, AttentionParams], Tensor]
    out_residual: Callable[[Tensor, Tensor, Linear], Tensor]
    mlp_residual: Callable[[Tensor, Tensor, MlpWeights, float], Tensor]
    moe_residual: Callable[[Tensor, Tensor, MoeWeights, MoeConfig, float], Tensor]
    logits: Callable[[Tensor, Tensor, Linear, float], Tensor]
    prepare: Callable[[PackedTensor], PackedTensor]
    methods: Methods
    prepare_embedding: Callable[[PackedTensor], PackedTensor] = as_in_file
    hardware: str = ""
    head_dim_multiple: int = 1
    compiles: bool = False
    compiling_ahead: Callable[
        [Iterable[str], ModelConfig, CacheConfig], AbstractContextManager[None]
    ] = nothing_ahead
    compile_together: Callable[[Callable[[], None]], None] | None = None
    records: bool = False
    turns: Turns = field(default_factory=Turns)


@dataclass(frozen=True)
class Primitives:
    """The pieces that `compose` builds a backend from; the defaults are the plain references."""

    embed: Callable[[Tensor, PackedTensor, torch.dtype], Tensor] = embed
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    linear: Callable[[Tensor, Linear], Tensor] = linear
    apply_rope: Callable[[Tensor, RopeTable], Tensor] = apply_rope
    store_kv: StoreKV = store_kv
    attention: SegmentAttention = attention_reference
    rotate: Rotate = hadamard_transform
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    moe_mlp: Callable[[Tensor, MoeWeights, MoeConfig], Tensor] = moe_mlp
    prepare: Callable[[PackedTensor], PackedTensor] = as_in_file


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

    def norm_qkv_rope_store(
        x: Tensor,
        weights: AttentionWeights,
        config: ModelConfig,
        inputs: TokenInputs,
        cache: LayerCache,
        segments: tuple[SegmentBatch, ...],
    ) -> Tensor:
        h = p.rms_norm(x, weights.attn_norm, config.rms_eps)
        q = p.linear(h, weights.attn_q).view(-1, config.n_heads, config.head_dim)
        k = p.linear(h, weights.attn_k).view(-1, config.n_kv_heads, config.head_dim)
        v = p.linear(h, weights.attn_v).view(-1, config.n_kv_heads, config.head_dim)
        if weights.attn_q_norm is not None and weights.attn_k_norm is not None:
            q = p.rms_norm(q, weights.attn_q_norm, config.rms_eps)
            k = p.rms_norm(k, weights.attn_k_norm, config.rms_eps)
        if inputs.rope is not None:
            q, k = p.apply_rope(q, inputs.rope), p.apply_rope(k, inputs.rope)
        if inputs.q_scale is not None:
            q = q * inputs.q_scale[:, None, None]
        store_rotated(p.store_kv, k, v, cache, segments)
        return q

    def run_attention(
        q: Tensor, cache: LayerCache, batch: Batch, params: AttentionParams
    ) -> Tensor:
        return attention(p.attention, q, cache, batch, params, p.rotate).flatten(1)

    def out_residual(x: Tensor, attn: Tensor, attn_output: Linear) -> Tensor:
        return x + p.linear(attn, attn_output)

    def mlp_residual(x: Tensor, ffn_norm: Tensor, mlp: MlpWeights, eps: float) -> Tensor:
        h = p.rms_norm(x, ffn_norm, eps)
        hidden = p.swiglu(p.linear(h, mlp.ffn_gate), p.linear(h, mlp.ffn_up))
        return x + p.linear(hidden, mlp.ffn_down)

    def moe_residual(
        x: Tensor, ffn_norm: Tensor, layer: MoeWeights, moe: MoeConfig, eps: float
    ) -> Tensor:
        return x + p.moe_mlp(p.rms_norm(x, ffn_norm, eps), layer, moe)

    def logits(x: Tensor, output_norm: Tensor, output: Linear, eps: float) -> Tensor:
        return p.linear(p.rms_norm(x, output_norm, eps), output).float()

    return Backend(
        name=name,
        device=torch.device(device),
        dtype=dtype,
        embed=lambda ids, token_embd: p.embed(ids, token_embd, dtype),
        norm_qkv_rope_store=norm_qkv_rope_store,
        attention=run_attention,
        out_residual=out_residual,
        mlp_residual=mlp_residual,
        moe_residual=moe_residual,
        logits=logits,
        prepare=p.prepare,
        methods=methods,
        head_dim_multiple=head_dim_multiple,
        compiles=compiles,
    )
