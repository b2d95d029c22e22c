"""Products with packed matrices and with routed experts, tile by tile."""

from __future__ import annotations

from torch import Tensor

from localkv.arch.spec import MoeSpec
from localkv.kernels import linear as by_tile
from localkv.kernels import moe
from localkv.kernels.activation import activate
from localkv.kernels.layer_weights import Linear, MoeWeights
from localkv.kernels.reference.torch_codec import decoded
from localkv.quant_formats.packed_tensor import PackedTensor


def matmul(x: Tensor, weight: PackedTensor) -> Tensor:
    """x [tokens, n_in] @ weight [n_out, n_in].T -> [tokens, n_out], in the dtype of `x`."""
    y: Tensor = by_tile.matmul(
        x, weight, lambda tile: decoded(tile, x.dtype), lambda x, rows: x @ rows.T
    )
    return y


def linear(x: Tensor, layer: Linear) -> Tensor:
    """x [tokens, n_in] -> [tokens, n_out]."""
    y = matmul(x, layer.weight)
    return y if layer.bias is None else y.add_(layer.bias)


def head_products(x: Tensor, stack: PackedTensor) -> Tensor:
    """As `kernels.linear.head_products`."""
    y: Tensor = by_tile.head_products(x, stack, matmul)
    return y


def moe_mlp(x: Tensor, layer: MoeWeights, spec: MoeSpec, routed: Tensor | None = None) -> Tensor:
    """As `kernels.moe.moe_mlp`."""
    y: Tensor = moe.moe_mlp(x, layer, spec, routed, matmul=matmul, linear=linear, activate=activate)
    return y
