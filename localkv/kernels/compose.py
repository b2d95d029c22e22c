"""A backend put together from primitives, without fusion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localkv.arch.spec import Activation, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from localkv.cache.arrays import Array, Arrays
from localkv.cache.kv_cache import Batch, LayerCache, SegmentBatch
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.attention import Rotate, SegmentAttention, attention
from localkv.kernels.backend import Backend, TokenInputs, as_in_file, capped_logits, scaled
from localkv.kernels.layer_weights import LayerWeights, Linear, MlpWeights, MoeWeights, Norm
from localkv.kernels.linear import Decode
from localkv.kernels.method import Methods
from localkv.kernels.namespace import namespace
from localkv.kernels.rope import RopeTable
from localkv.kernels.store_kv import StoreKV, store_rotated


@dataclass(frozen=True)
class Primitives:
    """The pieces that `compose` builds a backend from."""

    decode: Decode
    norm: Callable[[Array, Norm], Array]
    linear: Callable[[Array, Linear], Array]
    apply_rope: Callable[[Array, RopeTable], Array]
    store_kv: StoreKV
    attention: SegmentAttention
    rotate: Rotate
    gated: Callable[[Array, Array, Activation], Array]
    moe_mlp: Callable[[Array, MoeWeights, MoeSpec], Array]
    prepare: Callable[[PackedTensor], PackedTensor] = as_in_file


def compose(
    name: str,
    p: Primitives,
    *,
    arrays: Arrays,
    methods: Methods,
    head_dim_multiple: int = 1,
    compiles: bool = False,
) -> Backend:
    """A backend whose functions are put together from primitives, without fusion."""

    def normed(x: Array, norm: Norm | None) -> Array:
        return x if norm is None else p.norm(x, norm)

    def norm_qkv_rope_store(
        x: Array,
        layer: LayerWeights,
        spec: LayerSpec,
        inputs: TokenInputs,
        cache: LayerCache,
        segments: tuple[SegmentBatch, ...],
    ) -> Array:
        weights, attn = layer.attention, spec.attention
        h = normed(x, layer.attn_norm)
        q = p.linear(h, weights.attn_q).reshape(-1, attn.n_heads, attn.key_dim)
        k = p.linear(h, weights.attn_k).reshape(-1, attn.n_kv_heads, attn.key_dim)
        v = p.linear(h, weights.attn_v).reshape(-1, attn.n_kv_heads, attn.value_dim)
        q, k = normed(q, weights.attn_q_norm), normed(k, weights.attn_k_norm)
        if inputs.rope is not None:
            q, k = p.apply_rope(q, inputs.rope), p.apply_rope(k, inputs.rope)
        if inputs.q_scale is not None:
            q = q * inputs.q_scale[:, None, None]
        store_rotated(p.store_kv, p.rotate, k, v, cache, segments)
        return q

    def run_attention(
        q: Array, cache: LayerCache, batch: Batch, layer: LayerWeights, spec: LayerSpec
    ) -> Array:
        params, sinks = spec.attention.params, layer.attention.sinks
        out = attention(p.attention, q, cache, batch, params, sinks, rotate=p.rotate)
        return out.reshape(len(out), -1)

    def residual(x: Array, y: Array, post_norm: Norm | None, spec: LayerSpec) -> Array:
        return x + scaled(normed(y, post_norm), spec.residual_scale)

    def out_residual(x: Array, attn: Array, layer: LayerWeights, spec: LayerSpec) -> Array:
        y = p.linear(attn, layer.attention.attn_output)
        return residual(x, y, layer.post_attn_norm, spec)

    def mlp_residual(x: Array, source: Array, layer: LayerWeights, spec: LayerSpec) -> Array:
        mlp, ffn = layer.ffn, spec.ffn
        assert isinstance(mlp, MlpWeights)
        assert isinstance(ffn, MlpSpec)
        h = normed(source, layer.ffn_norm)
        hidden = p.gated(p.linear(h, mlp.ffn_gate), p.linear(h, mlp.ffn_up), ffn.activation)
        return residual(x, p.linear(hidden, mlp.ffn_down), layer.post_ffn_norm, spec)

    def moe_residual(x: Array, source: Array, layer: LayerWeights, spec: LayerSpec) -> Array:
        assert isinstance(layer.ffn, MoeWeights)
        assert isinstance(spec.ffn, MoeSpec)
        y = p.moe_mlp(normed(source, layer.ffn_norm), layer.ffn, spec.ffn)
        return residual(x, y, layer.post_ffn_norm, spec)

    def logits(x: Array, output_norm: Norm, output: Linear, spec: ModelSpec) -> Array:
        xp = namespace(x)
        y = xp.asarray(p.linear(p.norm(x, output_norm), output), dtype=xp.float32)
        return capped_logits(y, spec)

    return Backend(
        name=name,
        arrays=arrays,
        embed=lambda ids, token_embd, scale: scaled(p.decode(token_embd[ids]), scale),
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
