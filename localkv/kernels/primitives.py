"""The pieces that `compose` builds a backend from, and products with matrices decoded on the way.

A weight is decoded a tile of rows at a time, so that no weight ever takes more memory than its
file plus one tile (`quant_formats/base.TILE_VALUES` values), in any format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localkv.arch.spec import MlpSpec
from localkv.cache.arrays import Array
from localkv.kernels.attention import PackGroups, Rotate, SegmentAttention, StoreKV
from localkv.kernels.backend import as_in_file
from localkv.kernels.layer_weights import Linear, Norm
from localkv.kernels.namespace import dtype_name, namespace
from localkv.kernels.rope import RopeTable
from localkv.quant_formats.packed_tensor import PackedTensor

if TYPE_CHECKING:
    from localkv.kernels.attention_mixers import SegmentLatents


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


@dataclass(frozen=True)
class Primitives:
    """Operations of one kind of array.

    Attributes:
        decode: a packed matrix -> its values.
        norm: of rows, along the last axis.
        linear: (x [tokens, n_in], matrix and bias) -> [tokens, n_out].
        apply_rope: (rows [tokens, heads, channels], rotations) -> rotated rows.
        store_kv, pack_groups, attention, rotate: see their types.
        activate: as `activation.activate`.
        matmul: (x [tokens, n_in], matrix [n_out, n_in]) -> [tokens, n_out].
        latents: see `SegmentLatents`.
        head_products: (x [tokens, heads, n_in], a stack [heads, n_out, n_in]) -> each head's
            product [tokens, heads, n_out].
        prepare: see `Backend`.
    """

    decode: Decode
    norm: Callable[[Array, Norm], Array]
    linear: Callable[[Array, Linear], Array]
    apply_rope: Callable[[Array, RopeTable], Array]
    store_kv: StoreKV
    pack_groups: PackGroups
    attention: SegmentAttention
    rotate: Rotate
    activate: Callable[[Array, Array | None, MlpSpec], Array]
    matmul: Callable[[Array, PackedTensor], Array]
    latents: SegmentLatents
    head_products: Callable[[Array, PackedTensor], Array]
    prepare: Callable[[PackedTensor], PackedTensor] = as_in_file
