"""What follows a layer's mixer: output matrices, feed-forward blocks, norms and residuals."""

from __future__ import annotations

import torch
from torch import Tensor

from localkv.arch.spec import LayerSpec, MlpAndMoeSpec, MlpSpec, ModelSpec, MoeSpec
from localkv.kernels.backend import capped_logits
from localkv.kernels.gpu.moe import moe_mlp
from localkv.kernels.gpu.norm import added_norm, norm
from localkv.kernels.gpu.products.activations import Activations
from localkv.kernels.gpu.products.products import hidden_rows, linears, normed
from localkv.kernels.layer_weights import (
    LayerWeights,
    Linear,
    MlpAndMoeWeights,
    MlpWeights,
    MoeWeights,
    Norm,
)


def added(
    x: Tensor, source: Tensor | Activations, last: Linear, post_norm: Norm | None, spec: LayerSpec
) -> Tensor:
    """x + last(source), in one launch for one token, unless a norm or a factor comes between."""
    if post_norm is None and spec.residual_scale == 1.0:
        return linears(source, (last,), residual=x)[0]
    return with_rest(x, linears(source, (last,))[0], post_norm, spec)


def with_rest(x: Tensor, y: Tensor, post_norm: Norm | None, spec: LayerSpec) -> Tensor:
    """x + y, normed and scaled as the layer says; one launch."""
    if post_norm is not None:
        return added_norm(x, y, post_norm, spec.residual_scale)
    return torch.add(x, y, alpha=spec.residual_scale)


def normed_rows(x: Tensor, by: Norm | None) -> Tensor:
    """float32 [tokens, n], without a norm as they are."""
    return x if by is None else norm(x, by)


def out_residual(x: Tensor, mixed: Tensor, layer: LayerWeights, spec: LayerSpec) -> Tensor:
    """x + the mixer's output matrix times what it mixed."""
    assert layer.mixer is not None
    mixed = normed_rows(mixed, layer.mixed_norm)
    return added(x, mixed, layer.mixer.output, layer.post_attn_norm, spec)


def mlp_residual(x: Tensor, layer_input: Tensor, layer: LayerWeights, spec: LayerSpec) -> Tensor:
    """x + down(hidden rows of a norm); three launches for a token, and one for a norm after it."""
    assert isinstance(layer.ffn, MlpWeights)
    assert isinstance(spec.ffn, MlpSpec)
    source = layer_input if spec.parallel else x
    hidden = hidden_rows(source, layer.ffn_norm, layer.ffn, spec.ffn)
    hidden = normed_rows(hidden, layer.hidden_norm)
    return added(x, hidden, layer.ffn.ffn_down, layer.post_ffn_norm, spec)


def moe_residual(x: Tensor, layer_input: Tensor, layer: LayerWeights, spec: LayerSpec) -> Tensor:
    """x + the experts' output of a norm."""
    assert isinstance(layer.ffn, MoeWeights)
    assert isinstance(spec.ffn, MoeSpec)
    h = normed_rows(layer_input if spec.parallel else x, layer.ffn_norm)
    routed = layer_input if spec.ffn.router_reads_input else None
    if layer.post_ffn_norm is None and spec.residual_scale == 1.0:
        return moe_mlp(h, layer.ffn, spec.ffn, routed, residual=x)
    return with_rest(x, moe_mlp(h, layer.ffn, spec.ffn, routed), layer.post_ffn_norm, spec)


def both_residual(x: Tensor, layer_input: Tensor, layer: LayerWeights, spec: LayerSpec) -> Tensor:
    """x + a dense block's output and the experts', each normed."""
    weights, ffn = layer.ffn, spec.ffn
    assert isinstance(weights, MlpAndMoeWeights)
    assert isinstance(ffn, MlpAndMoeSpec)
    hidden = hidden_rows(x, layer.ffn_norm, weights.mlp, ffn.mlp)
    dense = norm(linears(hidden, (weights.mlp.ffn_down,))[0], weights.post_mlp_norm)
    routing = normed_rows(x, weights.moe.router_norm)
    routed = moe_mlp(norm(x, weights.moe_norm), weights.moe, ffn.moe, routing)
    both = added_norm(dense, routed, weights.post_moe_norm)
    return with_rest(x, both, layer.post_ffn_norm, spec)


def linear(x: Tensor, layer: Linear) -> Tensor:
    """x [tokens, n_in] -> [tokens, n_out]."""
    return linears(x.contiguous(), (layer,))[0]


def add_layer_input(x: Tensor, row: Tensor, layer: LayerWeights, spec: LayerSpec) -> Tensor:
    """See `Backend`; two products and a norm with its residual, and a product of torch."""
    weights = layer.per_layer_input
    assert weights is not None
    gate = MlpSpec(row.shape[-1], "gelu", gated=False)
    hidden = linears(x, (weights.inp_gate,), block=gate)[0] * row
    return added_norm(x, linear(hidden, weights.proj), weights.post_norm)


def logits(x: Tensor, output_norm: Norm, output: Linear, spec: ModelSpec) -> Tensor:
    """float32 [tokens, n_vocab], on the device."""
    y = linears(normed(x, output_norm, (output,)), (output,))[0]
    out: Tensor = capped_logits(y, spec)
    return out
