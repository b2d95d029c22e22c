"""Products with packed matrices.

A weight is decoded a tile of rows at a time, so that no weight ever takes more memory than its
file plus one tile (`packed_tensor.TILE_VALUES` values), in any format.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.layer_weights import Linear
from localkv.kernels.torch_codec import decoded

F16_MAX = 65504.0


def round_activations(x: Tensor, weight: PackedTensor) -> Tensor:
    """`x` [tokens, n_in], rounded as for the product with `weight`; in its own dtype.

    A float64 evaluation is meant to be exact and rounds nothing.
    """
    if not weight.halves_activations or x.dtype == torch.float64:
        return x
    return x.clamp(-F16_MAX, F16_MAX).half().to(x.dtype)


def times_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [tokens, n_in] @ rows [n_out, n_in].T -> [tokens, n_out]."""
    return x @ rows.T


def matmul(
    x: Tensor, weight: PackedTensor, times_rows: Callable[[Tensor, Tensor], Tensor] = times_rows
) -> Tensor:
    """x [tokens, n_in] @ weight [n_out, n_in].T -> [tokens, n_out], in the dtype of `x`.

    `times_rows` multiplies with a tile that has been decoded.
    """
    x = round_activations(x, weight)
    out = x.new_empty(x.shape[0], weight.shape[0])
    for rows, tile in weight.row_tiles():
        out[:, rows] = times_rows(x, decoded(tile, x.dtype))
    return out


def linear(x: Tensor, layer: Linear) -> Tensor:
    """x [tokens, n_in] -> [tokens, n_out]."""
    y = matmul(x, layer.weight)
    return y if layer.bias is None else y.add_(layer.bias)
