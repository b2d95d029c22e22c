"""A backend put together from primitives, without fusion."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from localkv.arch.spec import (
    AttentionSpec,
    EncoderAttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    MlpAndMoeSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
)
from localkv.cache.arrays import Array, Arrays
from localkv.kernels.attention_mixers import encoder_attention, grouped_attention, latent_attention
from localkv.kernels.backend import Backend, Methods, Tell, capped_logits, scaled
from localkv.kernels.layer_weights import (
    LayerWeights,
    Linear,
    MlpAndMoeWeights,
    MlpWeights,
    MoeWeights,
    Norm,
)
from localkv.kernels.moe import moe_mlp
from localkv.kernels.namespace import namespace
from localkv.kernels.primitives import Primitives
from localkv.kernels.recurrent import Recurrence, recurrent_mixers
from localkv.kernels.streams import layer_input
from localkv.quant_formats.packed_tensor import PackedTensor


def compose(
    name: str,
    p: Primitives,
    *,
    arrays: Arrays,
    methods: Methods,
    head_dim_multiple: int = 1,
    compiles: bool = False,
    tell: Tell | None = None,
) -> Backend:
    """A backend whose functions are put together from primitives, without fusion.

    Args:
        tell: called with what products are given, and what norms make.
    """
    own, given = p, tell
    if given is not None:
        p = _telling(p, given)

    def expert_product(x: Array, stack: PackedTensor, expert: int) -> Array:
        if given is not None:
            given(stack, x, expert)
        return p.matmul(x, stack[expert])

    def experts(x: Array, weights: MoeWeights, moe: MoeSpec, routed: Array | None) -> Array:
        if given is not None and weights.ffn_gate_inp_shexp is not None:
            given(weights.ffn_gate_inp_shexp, x, None)
        return moe_mlp(
            x, weights, moe, routed, product=expert_product, linear=p.linear, activate=p.activate
        )

    def normed(x: Array, norm: Norm | None) -> Array:
        return x if norm is None else p.norm(x, norm)

    def residual(x: Array, y: Array, post_norm: Norm | None, spec: LayerSpec) -> Array:
        return x + scaled(normed(y, post_norm), spec.residual_scale)

    def out_residual(x: Array, mixed: Array, layer: LayerWeights, spec: LayerSpec) -> Array:
        assert layer.mixer is not None
        y = p.linear(normed(mixed, layer.mixed_norm), layer.mixer.output)
        return residual(x, y, layer.post_attn_norm, spec)

    def mlp(x: Array, weights: MlpWeights, spec: MlpSpec, hidden_norm: Norm | None = None) -> Array:
        up, gate = p.linear(x, weights.ffn_up), None
        if weights.ffn_gate is not None:
            gate = p.linear(x, weights.ffn_gate)
        hidden = p.activate(up, None, spec) if gate is None else p.activate(gate, up, spec)
        return p.linear(normed(hidden, hidden_norm), weights.ffn_down)

    def mlp_residual(x: Array, layer_input: Array, layer: LayerWeights, spec: LayerSpec) -> Array:
        assert isinstance(layer.ffn, MlpWeights)
        assert isinstance(spec.ffn, MlpSpec)
        h = normed(layer_input if spec.parallel else x, layer.ffn_norm)
        y = mlp(h, layer.ffn, spec.ffn, layer.hidden_norm)
        return residual(x, y, layer.post_ffn_norm, spec)

    def moe_residual(x: Array, layer_input: Array, layer: LayerWeights, spec: LayerSpec) -> Array:
        assert isinstance(layer.ffn, MoeWeights)
        assert isinstance(spec.ffn, MoeSpec)
        h = normed(layer_input if spec.parallel else x, layer.ffn_norm)
        routed = layer_input if spec.ffn.router_reads_input else None
        y = experts(h, layer.ffn, spec.ffn, routed)
        return residual(x, y, layer.post_ffn_norm, spec)

    def both_residual(x: Array, layer_input: Array, layer: LayerWeights, spec: LayerSpec) -> Array:
        weights, ffn = layer.ffn, spec.ffn
        assert isinstance(weights, MlpAndMoeWeights)
        assert isinstance(ffn, MlpAndMoeSpec)
        dense = p.norm(mlp(normed(x, layer.ffn_norm), weights.mlp, ffn.mlp), weights.post_mlp_norm)
        routing = normed(x, weights.moe.router_norm)
        routed = experts(p.norm(x, weights.moe_norm), weights.moe, ffn.moe, routing)
        y = dense + p.norm(routed, weights.post_moe_norm)
        return residual(x, y, layer.post_ffn_norm, spec)

    def embed(ids: Array, token_embd: PackedTensor, scale: float) -> Array:
        # NumPy's rows would take torch's tensor of one id for a number
        return scaled(p.decode(token_embd[arrays.to_numpy(ids)]), scale)

    def logits(x: Array, output_norm: Norm, output: Linear, spec: ModelSpec) -> Array:
        xp = namespace(x)
        y = xp.asarray(p.linear(p.norm(x, output_norm), output), dtype=xp.float32)
        return capped_logits(y, spec)

    def watched(tell: Tell) -> Backend:
        return compose(
            name,
            own,
            arrays=arrays,
            methods=methods,
            head_dim_multiple=head_dim_multiple,
            compiles=compiles,
            tell=tell,
        )

    return Backend(
        name=name,
        arrays=arrays,
        embed=embed,
        mixers={
            AttentionSpec: partial(grouped_attention, p),
            EncoderAttentionSpec: partial(encoder_attention, p),
            LatentAttentionSpec: partial(latent_attention, p),
            **recurrent_mixers(Recurrence(p.norm, p.linear)),
        },
        out_residual=out_residual,
        ffns={MlpSpec: mlp_residual, MoeSpec: moe_residual, MlpAndMoeSpec: both_residual},
        logits=logits,
        norm=p.norm,
        linear=p.linear,
        add_layer_input=lambda x, row, layer, spec: (
            x + layer_input(x, row, layer, p.linear, p.norm)
        ),
        prepare=p.prepare,
        methods=methods,
        head_dim_multiple=head_dim_multiple,
        compiles=compiles,
        watched=watched,
    )


def _telling(p: Primitives, tell: Tell) -> Primitives:
    """Primitives that call `tell` with what products are given, and what norms make."""

    def norm(x: Array, norm: Norm) -> Array:
        y = p.norm(x, norm)
        tell(norm, y, None)
        return y

    def linear(x: Array, layer: Linear) -> Array:
        tell(layer.weight, x, None)
        return p.linear(x, layer)

    def head_products(x: Array, stack: PackedTensor) -> Array:
        for head in range(x.shape[1]):
            tell(stack, x[:, head], head)
        return p.head_products(x, stack)

    return replace(p, norm=norm, linear=linear, head_products=head_products)
