"""The reference's operations in plain torch: norms, RoPE, products, rotation, the store.

Norms are RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016). Products go tile by tile,
and rows are packed by the formats' own encoders. The Hadamard transform is a rotation that spreads
an outlier over all the channels of its block.

Rows of K and V that are stored in blocks with one scale lose less when they are rotated first
(QuaRot, Ashkboos et al. 2024; llama.cpp does so too). Attention stays the same: q . k does not
change if both are rotated, and a sum of rotated rows of V is the rotated sum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from localkv.arch.spec import MoeSpec
from localkv.cache.arrays import LayerCache, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels import linear as by_tile
from localkv.kernels import moe
from localkv.kernels.activation import activate
from localkv.kernels.layer_weights import Linear, MoeWeights, Norm
from localkv.kernels.reference.torch_arrays import decode, decoded, encode
from localkv.kernels.rope import RopeTable
from localkv.quant_formats.base import QuantFormat
from localkv.quant_formats.packed_tensor import PackedTensor


def norm(x: Tensor, norm: Norm) -> Tensor:
    """x along its last axis, normed and weighted; same shape and dtype as `x`.

    RMSNorm: x / sqrt(mean(x^2) + eps) * weight. LayerNorm takes the mean off x first, and adds its
    bias, if it has one.
    """
    if norm.spec.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.spec.eps) * norm.weight
    return y if norm.bias is None else y + norm.bias


def apply_rope(x: Tensor, table: RopeTable) -> Tensor:
    """Rotate the first n_dims channels of each head of x [tokens, heads, head_dim]."""
    n_dims = 2 * table.cos.shape[-1]
    rotated, rest = x[..., :n_dims], x[..., n_dims:]
    cos, sin = table.cos[:, None], table.sin[:, None]  # [tokens, 1, n_dims / 2]
    if table.interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((turned, rest), dim=-1)


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


def hadamard_transform(x: Tensor, block: int) -> Tensor:
    """`x` [..., n] times the normalised Hadamard matrix (Sylvester's) in blocks of the last axis.

    The matrix is symmetric and orthogonal: applied twice, the transform gives `x` back. Sums are
    made in pairs of distance 1, 2, 4, ..., for any shape, so that a row's result does not
    depend on its batch, and a fused kernel that does the same gets the same bits.

    Args:
        block: a power of two that divides n; 0 leaves `x` as it is.
    """
    if block == 0:
        return x
    if block & (block - 1) or x.shape[-1] % block:
        raise ValueError(f"a Hadamard transform of {block} does not fit {x.shape[-1]} channels")
    y = x.view(*x.shape[:-1], x.shape[-1] // block, block)
    # sums to the first half and differences to the second: after every bit of the channel's number
    # had its turn as the lowest, all channels are back in order
    for _ in range(block.bit_length() - 1):
        even, odd = y[..., 0::2], y[..., 1::2]
        y = torch.cat((even + odd, even - odd), dim=-1)
    return (y * (1 / math.sqrt(block))).flatten(-2)


def _store_rows(
    fmt: QuantFormat,
    planes: tuple[Tensor, ...],
    x: Tensor,
    batch: SegmentBatch,
    codebook: Tensor | None,
) -> None:
    pages, offsets = batch.slots // PAGE_TOKENS, batch.slots % PAGE_TOKENS
    for plane, values in zip(planes, encode(fmt, x[batch.tokens].cpu(), codebook), strict=True):
        plane[pages, :, offsets] = values.to(plane.device)


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, batches: tuple[SegmentBatch, ...]) -> None:
    """Store a batch's rows: k, v [tokens, n_kv_heads, head_dim], each in its segment's types."""
    for segment, batch in zip(cache.segments, batches, strict=True):
        if segment.is_whole:
            continue
        _store_rows(segment.format_k, segment.k, k, batch, segment.codebook_k)
        _store_rows(segment.format_v, segment.v, v, batch, segment.codebook_v)


def pack_groups(segment: Segment, tail: Segment, groups: Tensor) -> None:
    """See `PackGroups`."""
    of_k = segment.format_k, segment.k, tail.k
    of_v = segment.format_v, segment.v, tail.v
    size = max(segment.format_k.group_tokens, segment.format_v.group_tokens)
    groups = groups[(groups >= 0).all(1)]
    goal, source = (slots[:, None] + torch.arange(size, device=slots.device) for slots in groups.T)
    for fmt, planes, rows, rotation, scale, codebook in (
        (*of_k, segment.rotation_k, segment.scale_k, segment.codebook_k),
        (*of_v, segment.rotation_v, segment.scale_v, segment.codebook_v),
    ):
        # [groups, tokens, heads, 1, channels] -> [groups, heads, tokens, channels]
        halves = rows[0][source // PAGE_TOKENS, :, source % PAGE_TOKENS].transpose(1, 2)
        x = hadamard_transform(decode(tail.format_k, [halves.cpu()]), rotation)
        if scale is not None:
            x = x / scale.cpu()[:, None, None]
        for plane, values in zip(planes, encode(fmt, x, codebook), strict=True):
            packed = values.to(plane.device).transpose(1, 2)
            plane[goal // PAGE_TOKENS, :, goal % PAGE_TOKENS] = packed
