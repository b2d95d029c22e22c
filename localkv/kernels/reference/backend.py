"""REFERENCE: plain torch, slow and easy to trust; every test compares with it.

Norms are RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016). Products go tile by tile,
rows are packed by the formats' own encoders, and attention decodes all of a sequence's rows.

Rows of K and V that are stored in blocks with one scale lose less when a Hadamard transform rotates
them first. It spreads an outlier over all the channels of its block (QuaRot, Ashkboos et al. 2024;
llama.cpp does so too). Attention stays the same: q . k does not change if both are rotated, and a
sum of rotated rows of V is the rotated sum.

K may be in the cache as it is before RoPE, as KVQuant has it (arXiv:2401.18079, 3.2). A channel of
K then has much the same values at all positions, but each step has to rotate every key that it
reads. Only the reference does so, to compare with; kernels read K as it is after RoPE.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams, AttentionSpec, LatentAttentionSpec, LayerSpec
from localkv.cache.arrays import Batch, LayerCache, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels import primitives as by_tile
from localkv.kernels.activation import activate
from localkv.kernels.attention import merge_segments, times_scales
from localkv.kernels.attention_mixers import grouped_attention
from localkv.kernels.backend import Backend, Method, Methods, TokenInputs
from localkv.kernels.compose import compose
from localkv.kernels.layer_weights import AttentionWeights, Linear, Norm
from localkv.kernels.primitives import Primitives
from localkv.kernels.reference.torch_arrays import TorchArrays, decode, decoded, encode
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
    if layer.bias is not None:
        y = y.add_(layer.bias)
    if layer.adapters is None:
        return y
    added: Tensor = layer.adapters.add(x, y)
    return added


def head_products(x: Tensor, stack: PackedTensor) -> Tensor:
    """See `primitives.head_products`."""
    y: Tensor = by_tile.head_products(x, stack, matmul)
    return y


def hadamard_transform(x: Tensor, block: int) -> Tensor:
    """`x` [..., n] times the normalised Hadamard matrix (Sylvester's) in blocks of the last axis.

    The matrix is symmetric and orthogonal: applied twice, the transform gives `x` back. Sums are
    made in pairs of distance 1, 2, 4, ..., for any shape. So a row's result does not depend on its
    batch, and a fused kernel that does the same gets the same bits.

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


def read_pages(
    fmt: QuantFormat,
    planes: tuple[Tensor, ...],
    pages: Tensor,
    n_rows: int,
    dtype: torch.dtype,
    codebook: Tensor | None = None,
) -> Tensor:
    """The first `n_rows` rows of `pages`, decoded: [n_kv_heads, n_rows, head_dim]."""
    rows = decode(
        fmt, [plane[pages].cpu() for plane in planes], codebook
    )  # [pages, heads, rows, head_dim]
    return rows.transpose(0, 1).flatten(1, 2)[:, :n_rows].to(planes[0].device, dtype)


def group_queries(q: Tensor, n_kv_heads: int) -> Tensor:
    """[tokens, n_heads, d] -> [n_kv_heads, group * tokens, d]: the heads that share K and V."""
    tokens, n_heads, head_dim = q.shape
    grouped = q.view(tokens, n_kv_heads, n_heads // n_kv_heads, head_dim)
    return grouped.permute(1, 2, 0, 3).reshape(n_kv_heads, -1, head_dim)


def ungroup(x: Tensor, tokens: int) -> Tensor:
    """The inverse of `group_queries`, for [n_kv_heads, group * tokens, ...]."""
    n_kv_heads = x.shape[0]
    grouped = x.view(n_kv_heads, -1, tokens, *x.shape[2:])
    return grouped.movedim(2, 0).flatten(1, 2)


def visible(
    positions: Tensor,
    params: AttentionParams,
    first_key: int,
    n_keys: int,
    group: int,
    seg_batch: SegmentBatch,
    sequence: int,
) -> Tensor:
    """Mask [group * tokens, n_keys] for keys at `first_key`, `first_key` + 1, ...: causal, no
    further back than a window or chunk, and keys of the tail in its segment alone."""
    keys = torch.arange(first_key, first_key + n_keys, device=positions.device)
    mask: Tensor = (keys <= positions[:, None]) & (keys >= params.first_visible(positions)[:, None])
    if seg_batch.tail is not None:
        begin = seg_batch.tail.begin(positions).clamp(min=seg_batch.exact_from[sequence])
        mask &= (keys >= begin[:, None]) == seg_batch.is_tail
    return mask.repeat(group, 1)


def distances(
    positions: Tensor,
    params: AttentionParams,
    first_key: int,
    n_keys: int,
    n_heads: int,
    logits: Tensor,
) -> Tensor:
    """ALiBi's addends to logits [n_kv_heads, group * tokens, n_keys]."""
    keys = torch.arange(first_key, first_key + n_keys, device=positions.device)
    slopes = torch.tensor(params.slopes(n_heads), dtype=logits.dtype, device=logits.device)
    return (slopes[:, None, None] * (keys - positions[:, None])).reshape(logits.shape)


def first_of_tail(positions: Tensor, seg_batch: SegmentBatch, sequence: int) -> int:
    """The first row that tokens read of a segment of tails; 0 in other segments."""
    if seg_batch.tail is None or not seg_batch.is_tail:
        return 0
    begin = max(int(seg_batch.tail.begin(positions).min()), seg_batch.exact_from[sequence])
    return begin - seg_batch.first_position


Turn = Callable[[Tensor, int, Segment], Tensor]
"""(K as it is stored [n_kv_heads, keys, head_dim], the first key's position, its segment) -> K as q
meets it."""


def attention_reference(
    q: Tensor,
    segment: Segment,
    seg_batch: SegmentBatch,
    batch: Batch,
    params: AttentionParams,
    turn: Turn | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode all of K and V, then plain softmax. See `SegmentAttention` for shapes."""
    n_kv_heads = segment.k[0].shape[1]
    group = q.shape[1] // n_kv_heads
    out = torch.zeros_like(q)
    lse = torch.full_like(q[..., 0], -torch.inf)
    for i, length in enumerate(seg_batch.lengths):
        rows = slice(batch.starts[i], batch.starts[i + 1])
        positions = batch.positions[rows]
        first = int(params.first_visible(positions).min()) - seg_batch.first_of(i)
        first = max(first, first_of_tail(positions, seg_batch, i))
        if first >= length or not length:
            continue
        # pages before may have been given back
        skipped = max(0, first) // PAGE_TOKENS
        n_keys = length - skipped * PAGE_TOKENS
        pages = seg_batch.page_table[i, skipped : -(-length // PAGE_TOKENS)]
        k = read_pages(segment.format_k, segment.k, pages, n_keys, q.dtype, segment.codebook_k)
        v = read_pages(segment.format_v, segment.v, pages, n_keys, q.dtype, segment.codebook_v)
        first_key = seg_batch.first_of(i) + skipped * PAGE_TOKENS
        if turn is not None:
            k = turn(k, first_key, segment)
        logits = group_queries(q[rows], n_kv_heads) @ k.mT * params.softmax_scale
        if params.softcap:
            logits = params.softcap * torch.tanh(logits / params.softcap)
        if params.alibi:
            logits = logits + distances(positions, params, first_key, n_keys, q.shape[1], logits)
        mask = visible(positions, params, first_key, n_keys, group, seg_batch, i)
        logits = logits.masked_fill(~mask, -torch.inf)
        tokens = rows.stop - rows.start
        weights = logits.softmax(-1).masked_fill(~mask, 0.0)  # NaN where nothing is visible
        out[rows] = ungroup(weights @ v, tokens)
        lse[rows] = ungroup(logits.logsumexp(-1), tokens)
    return out, lse


def latents_reference(
    q: Tensor,
    q_rotated: Tensor,
    segment: Segment,
    seg_batch: SegmentBatch,
    batch: Batch,
    params: AttentionParams,
) -> tuple[Tensor, Tensor]:
    """Decode all rows, then plain softmax. See `SegmentLatents` for shapes."""
    n_heads = q.shape[1]
    out = torch.zeros_like(q)
    lse = torch.full_like(q[..., 0], -torch.inf)
    for i, length in enumerate(seg_batch.lengths):
        tokens = slice(batch.starts[i], batch.starts[i + 1])
        first = first_of_tail(batch.positions[tokens], seg_batch, i)
        if first >= length:
            continue
        # pages before may have been given back
        skipped = first // PAGE_TOKENS
        n_rows = length - skipped * PAGE_TOKENS
        pages = seg_batch.page_table[i, skipped : -(-length // PAGE_TOKENS)]
        latents = read_pages(
            segment.format_k, segment.k, pages, n_rows, q.dtype, segment.codebook_k
        )[0]
        rotated = read_pages(
            segment.format_v, segment.v, pages, n_rows, q.dtype, segment.codebook_v
        )[0]
        logits = q[tokens] @ latents.mT + q_rotated[tokens] @ rotated.mT  # [tokens, heads, rows]
        logits = logits * params.softmax_scale
        if params.softcap:
            logits = params.softcap * torch.tanh(logits / params.softcap)
        keys = seg_batch.first_position + skipped * PAGE_TOKENS, n_rows
        mask = visible(batch.positions[tokens], params, *keys, 1, seg_batch, i)
        mask = mask[:, None].expand(-1, n_heads, -1)
        logits = logits.masked_fill(~mask, -torch.inf)
        weights = logits.softmax(-1).masked_fill(~mask, 0.0)  # NaN where nothing is visible
        out[tokens] = weights @ latents
        lse[tokens] = logits.logsumexp(-1)
    return out, lse


def attend_before_rope(
    p: Primitives,
    q: Tensor,
    cache: LayerCache,
    batch: Batch,
    attn: AttentionSpec,
    weights: AttentionWeights,
    inputs: TokenInputs,
) -> Tensor:
    """Attend to rows of K that are turned when they are read; see `Attend`."""

    def turned(k: Tensor, first: int, segment: Segment) -> Tensor:
        # a matrix of Hadamard's undoes itself
        rows: Tensor = p.rotate(k, segment.rotation_k).transpose(0, 1)
        rows = times_scales(rows, segment.scale_k)
        if inputs.rope_at is not None:
            positions = torch.arange(first, first + len(rows), device=rows.device)
            rows = p.apply_rope(rows, inputs.rope_at(positions))
        return rows.transpose(0, 1)

    parts = []
    for segment, rows in zip(cache.segments, cache.rows_of(batch), strict=True):
        out, lse = attention_reference(q, segment, rows, batch, attn.params, turned)
        parts.append((p.rotate(times_scales(out, segment.scale_v), segment.rotation_v), lse))
    merged: Tensor = merge_segments(parts, weights.sinks)
    return merged


def lacks_before_rope(spec: LayerSpec) -> str:
    """What of a layer can't have K before RoPE, in words; empty if it can."""
    for mixer in (spec.mixer, spec.beside):
        if isinstance(mixer, LatentAttentionSpec):
            return "latents with K before RoPE"
        if isinstance(mixer, AttentionSpec) and mixer.norms_after_rope:
            return "K before RoPE where heads are normed after it"
    return ""


METHODS = Methods(
    attention=Method("all of K and V decoded, softmax in torch"),
    tiles=lambda fmt, side: Method("the backend's float type"),
    store=lambda fmt: Method("torch"),
    product=lambda weight: Method("decoded tile by tile, multiplied in torch"),
    experts=lambda moe: Method("torch, one expert after the other"),
)
"""The reference is plain torch throughout, so nothing in it is slow for want of a kernel."""


def reference_backend(
    dtype: torch.dtype = torch.float32, *, k_before_rope: bool = False
) -> Backend:
    """The reference in float32, or in float64 as an exact evaluation.

    Args:
        k_before_rope: K is in the cache as it is before RoPE.
    """
    primitives = Primitives(
        decode=lambda weight: decoded(weight, dtype),
        norm=norm,
        linear=linear,
        apply_rope=apply_rope,
        store_kv=store_kv,
        pack_groups=pack_groups,
        attention=attention_reference,
        rotate=hadamard_transform,
        activate=activate,
        matmul=matmul,
        latents=latents_reference,
        head_products=head_products,
    )
    backend = compose("reference", primitives, arrays=TorchArrays("cpu", dtype), methods=METHODS)
    if not k_before_rope:
        return backend
    mixers = dict(backend.mixers)
    mixers[AttentionSpec] = partial(
        grouped_attention, primitives, attend=attend_before_rope, stores_turned=False
    )
    words = f"{METHODS.attention.words}, K rotated as it is read"
    methods = replace(METHODS, attention=Method(words))
    return replace(backend, mixers=mixers, methods=methods, lacks=lacks_before_rope)
