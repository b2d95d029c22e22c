"""The pieces that `compose` builds a backend from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localkv.arch.spec import MlpSpec, MoeSpec
from localkv.cache.arrays import Array
from localkv.kernels.attention import PackGroups, Rotate, SegmentAttention, StoreKV
from localkv.kernels.backend import as_in_file
from localkv.kernels.layer_weights import Linear, MoeWeights, Norm
from localkv.kernels.linear import Decode
from localkv.kernels.rope import RopeTable
from localkv.quant_formats.packed_tensor import PackedTensor

if TYPE_CHECKING:
    from localkv.kernels.attention_mixers import SegmentLatents


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
        moe_mlp: (x, weights, spec, what the router reads if not x) -> the experts' output
            [tokens, n_embd].
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
    moe_mlp: Callable[[Array, MoeWeights, MoeSpec, Array | None], Array]
    latents: SegmentLatents
    head_products: Callable[[Array, PackedTensor], Array]
    prepare: Callable[[PackedTensor], PackedTensor] = as_in_file
