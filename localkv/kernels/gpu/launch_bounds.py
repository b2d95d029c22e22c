"""Checks of the GPU kernels' arguments, as far as the host knows them: shapes, types, layouts.

Ids and lengths in the device's memory are not looked at, as the host would have to wait for them.
They come from `KVCache` and from the kernels that draw tokens, which keep them within bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from localkv.cache.arrays import Batch, Segment, SegmentBatch
from localkv.kernels.bounds import BoundsError, check_array, check_segment, check_tables
from localkv.kernels.gpu.products.plane_tensor import PlaneTensor
from localkv.kernels.layer_weights import Linear, Norm
from localkv.kernels.namespace import dtype_name
from localkv.kernels.rope import RopeTable


def check_attention(
    q: Tensor, segment: Segment, rows: SegmentBatch, batch: Batch, sinks: Tensor | None
) -> None:
    """Queries, pages and tables are of the same tokens, heads and sequences."""
    _, n_heads, head_dim = q.shape
    n_sequences, n_kv_heads = len(batch.starts) - 1, segment.k[0].shape[1]
    check_segment(segment, head_dim, segment.value_dim, pages_apart=True)
    check_tables(rows, batch)
    check_array("queries", q, dtype_name(q), batch.starts[-1], n_heads, head_dim)
    check_array("lengths", rows.length_table, "int32", n_sequences)
    check_array("starts", batch.start_table, "int32", n_sequences + 1)
    if n_heads % n_kv_heads:
        raise BoundsError(f"{n_heads} heads of {n_kv_heads} KV heads")
    if rows.first_table is not None:
        check_array("positions of rows 0", rows.first_table, "int64", n_sequences)
    if rows.tail is not None:
        check_array("tails", rows.exact_table, "int64", n_sequences)
    if sinks is not None:
        check_array("sinks", sinks, "float32", n_heads)


def check_rows(x: Tensor, name: str, n_tokens: int, n_heads: int, head_dim: int) -> None:
    """Heads of tokens, of any type; they may be further apart than they are long."""
    stride = x.stride(1)
    wanted = (n_heads * stride, stride, 1)
    if x.shape != (n_tokens, n_heads, head_dim) or stride < head_dim:
        raise BoundsError(f"{name}: {list(x.shape)} instead of {[n_tokens, n_heads, head_dim]}")
    for size, step, want in zip(x.shape, x.stride(), wanted, strict=True):
        if size > 1 and step != want:
            raise BoundsError(f"{name}: strides {x.stride()} instead of {wanted}")


def check_weight(norm: Norm, n_heads: int, head_dim: int) -> None:
    """A norm of heads, with weights for all of them or for each."""
    heads = (n_heads,) if norm.spec.span == "heads" else ()
    check_array("a norm's weight", norm.weight, "float32", *heads, head_dim)


def check_turns(rope: RopeTable, n_tokens: int, head_dim: int) -> None:
    """A table for these tokens, of no more channels than a head has."""
    pairs = rope.cos.shape[-1]
    if 2 * pairs > head_dim:
        raise BoundsError(f"RoPE turns {pairs} pairs of {head_dim} channels")
    for name, turn in (("cosines", rope.cos), ("sines", rope.sin)):
        check_array(name, turn, "float32", n_tokens, pairs)


def check_stored(k: Tensor, v: Tensor, segment: Segment, batch: SegmentBatch) -> None:
    """Rows are of the segment's heads, and there is a slot for each that is stored."""
    n_tokens, _, head_dim = k.shape
    check_segment(segment, head_dim, v.shape[-1], pages_apart=True)
    n_kv_heads = segment.k[0].shape[1]
    for name, x in (("k", k), ("v", v)):
        check_array(name, x, dtype_name(x), n_tokens, n_kv_heads, x.shape[-1])
    for name, ids in (("tokens", batch.tokens), ("slots", batch.slots)):
        check_array(name, ids, "int64", batch.slots.numel())


def check_products(
    values: Tensor,
    weights: Sequence[PlaneTensor],
    layers: Sequence[Linear] = (),
    residual: Tensor | None = None,
) -> None:
    """Matrices, or stacks, are as wide as the activations; added vectors are as long as a row."""
    n_tokens, n_in = values.shape
    check_array("activations", values, dtype_name(values), n_tokens, n_in)
    for weight in weights:
        check_planes(weight, n_in)
    for layer in layers:
        if layer.bias is not None:
            check_array("a bias", layer.bias, dtype_name(layer.bias), layer.weight.shape[0])
    if residual is not None:
        check_array("a residual", residual, "float32", n_tokens, weights[0].shape[0])


def check_planes(weight: PlaneTensor, n_in: int) -> None:
    """A matrix or a stack of `n_in` columns, whose planes have all rows."""
    if weight.shape[-1] != n_in:
        raise BoundsError(f"{weight.format.name} {weight.shape} for {n_in} columns")
    for plane in weight.planes:
        if len(plane) != math.prod(weight.shape[:-1]) or not plane.is_contiguous():
            raise BoundsError(f"a plane of {weight.format.name} has {len(plane)} rows")


def check_experts(
    x: Tensor,
    experts: Tensor,
    factors: Tensor,
    stacks: tuple[PlaneTensor | None, PlaneTensor, PlaneTensor],
    stack_rows: int,
    n_ff: int,
    added: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Check what products with experts are given.

    Gate, if there is one, and up have `stack_rows` an expert, and down takes `n_ff` values. Then
    there are ids of each token, and biases of the three and factors of down, where there are any.
    """
    gate, up, down = stacks
    n_experts, n_embd = up.shape[0], up.shape[-1]
    shape = (n_experts, stack_rows, n_embd)
    if up.shape != shape or down.shape != (n_experts, n_embd, n_ff):
        raise BoundsError(f"experts {up.shape}, {down.shape} of {n_ff}")
    if gate is not None and gate.shape != shape:
        raise BoundsError(f"experts {gate.shape}, {up.shape}")
    for weight, n_in in ((gate, x.shape[-1]), (up, x.shape[-1]), (down, n_ff)):
        if weight is not None:
            check_planes(weight, n_in)
    names = ("gate's biases", "up's biases", "down's biases", "down's factors")
    shapes = ((stack_rows,), (stack_rows,), (n_embd,), ())
    for name, values, rows in zip(names, added, shapes, strict=True):
        if values is not None:
            check_array(name, values, "float32", n_experts, *rows)
    token_shape = (x.shape[0], experts.shape[-1])
    check_array("experts", experts, "int32", *token_shape)
    check_array("factors", factors, "float32", *token_shape)
