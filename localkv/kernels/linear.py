"""Products with packed matrices that are decoded on the way.

A weight is decoded a tile of rows at a time, so that no weight ever takes more memory than its
file plus one tile (`quant_formats/base.TILE_VALUES` values), in any format.
"""

from __future__ import annotations

from collections.abc import Callable

from localkv.cache.arrays import Array
from localkv.kernels.namespace import dtype_name, namespace
from localkv.quant_formats.packed_tensor import PackedTensor

F16_MAX = 65504.0

Decode = Callable[[PackedTensor], Array]
"""A packed tensor -> all its values, in the backend's type."""


def round_activations(x: Array, weight: PackedTensor) -> Array:
    """`x` [tokens, n_in], rounded as for the product with `weight`; in its own dtype.

    A float64 evaluation is meant to be exact and rounds nothing.
    """
    if not weight.halves_activations or dtype_name(x) == "float64":
        return x
    xp = namespace(x)
    return xp.asarray(xp.asarray(xp.clip(x, -F16_MAX, F16_MAX), dtype=xp.float16), dtype=x.dtype)


def matmul(
    x: Array, weight: PackedTensor, decode: Decode, times_rows: Callable[[Array, Array], Array]
) -> Array:
    """x [tokens, n_in] @ weight [n_out, n_in].T -> [tokens, n_out], in the dtype of `x`.

    Args:
        decode: of a tile.
        times_rows: x [tokens, n_in] @ rows [n_out, n_in].T.
    """
    x, xp = round_activations(x, weight), namespace(x)
    out = xp.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
    for rows, tile in weight.row_tiles():
        out[:, rows] = times_rows(x, decode(tile))
    return out


def head_products(
    x: Array, stack: PackedTensor, product: Callable[[Array, PackedTensor], Array]
) -> Array:
    """Each head's matrix times that head's rows.

    Args:
        x: [tokens, heads, n_in].
        stack: [heads, n_out, n_in].
        product: (rows [tokens, n_in], matrix [n_out, n_in]) -> [tokens, n_out].

    Returns:
        [tokens, heads, n_out].
    """
    n_heads = stack.shape[0]
    return namespace(x).stack([product(x[:, i], stack[i]) for i in range(n_heads)], axis=1)
