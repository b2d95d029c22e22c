"""Causal attention over the packed, paged cache.

Attention runs segment by segment and yields the output and the log-sum-exp of the logits, by
which the segments' outputs are merged. The rows of the batch itself are read from the cache like
all others, so a prompt gives the same in one chunk as in many.

New rows of K and V are packed into their pages first.
"""

from __future__ import annotations

from collections.abc import Callable

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Array, Batch, LayerCache, Segment, SegmentBatch
from localkv.errors import UsageError
from localkv.kernels.namespace import namespace

SegmentAttention = Callable[
    [Array, Segment, SegmentBatch, Batch, AttentionParams], tuple[Array, Array]
]
"""(q, segment, its batch, batch, params) -> output [tokens, n_heads, head_dim] and log-sum-exp
[tokens, n_heads]. Of a token that sees no row of the segment they are 0 and minus infinity."""

Rotate = Callable[[Array, int], Array]
"""(rows [..., head_dim], block) -> rows times the Hadamard matrix in blocks; 0 leaves them."""


def merge_segments(parts: list[tuple[Array, Array]], sinks: Array | None = None) -> Array:
    """Outputs [tokens, n_heads, head_dim] of several segments, weighted by exp(log-sum-exp).

    Args:
        sinks: [n_heads], logits of one more segment for each head, whose output is 0.
    """
    if len(parts) == 1 and sinks is None:
        return parts[0][0]
    xp = namespace(parts[0][0])
    lse = xp.stack([lse for _, lse in parts])
    # torch's softmax along this axis would treat the last few tokens differently from the others
    most = xp.amax(lse, axis=0)
    if sinks is not None:
        most = xp.maximum(most, sinks)
    weights = xp.exp(lse - most)
    total = xp.sum(weights, axis=0)
    if sinks is not None:
        total = total + xp.exp(sinks - most)
    weights = weights / total
    return xp.sum(xp.stack([out for out, _ in parts]) * weights[..., None], axis=0)


Merge = Callable[[list[tuple[Array, Array]], Array | None], Array]
"""A function like `merge_segments`."""


def times_scales(x: Array, scale: Array | None) -> Array:
    """x [tokens, n_heads, channels] times the scale of each head's KV head: [n_kv_heads]."""
    if scale is None:
        return x
    tokens, _, channels = x.shape
    return (x.reshape(tokens, len(scale), -1, channels) * scale[:, None, None]).reshape(x.shape)


def attention(
    run: SegmentAttention,
    q: Array,
    cache: LayerCache,
    batch: Batch,
    params: AttentionParams,
    sinks: Array | None = None,
    *,
    rotate: Rotate,
    merge: Merge = merge_segments,
) -> Array:
    """Attention of a batch over all segments: q and result [tokens, n_heads, head_dim].

    Queries meet the rotated keys of a segment rotated, and its output is rotated back. Scales of
    heads are applied to queries and outputs, so that no kernel knows of them.
    """
    parts = []
    for segment, seg_batch in zip(cache.segments, cache.rows_of(batch), strict=True):
        if seg_batch.is_empty:
            continue
        rotated = times_scales(rotate(q, segment.rotation_k), segment.scale_k)
        out, lse = run(rotated, segment, seg_batch, batch, params)
        parts.append((rotate(times_scales(out, segment.scale_v), segment.rotation_v), lse))
    if params.alibi and len(parts) > 1:
        raise UsageError("attention that is biased by distance reads one segment of a cache")
    return merge(parts, sinks)


StoreKV = Callable[[Array, Array, LayerCache, tuple[SegmentBatch, ...]], None]
"""(k, v, cache, its batches) with k, v [tokens, n_kv_heads, head_dim] as they are to be packed."""

PackGroups = Callable[[Segment, Segment, Array], None]
"""(segment, the tails' segment, groups int64 [n, 2]): pack groups of rows of the tails, rotated and
scaled by head as the segment wants them; see `SegmentBatch.groups`."""


def pack_groups(pack: PackGroups, cache: LayerCache, batches: tuple[SegmentBatch, ...]) -> None:
    """Pack the groups that a batch has completed, once its rows are stored."""
    for segment, batch in zip(cache.segments, batches, strict=True):
        if batch.groups is not None and len(batch.groups):
            pack(segment, cache.segments[-1], batch.groups)


def store_rotated(
    store: StoreKV,
    rotate: Rotate,
    k: Array,
    v: Array,
    cache: LayerCache,
    batches: tuple[SegmentBatch, ...],
) -> None:
    """Let `store` pack a batch's rows, rotated and scaled by head as each segment wants them."""
    for segment, batch in zip(cache.segments, batches, strict=True):
        if len(batch.tokens):
            rotated_k = rotate(k, segment.rotation_k)
            rotated_v = rotate(v, segment.rotation_v)
            if segment.scale_k is not None:
                rotated_k = rotated_k / segment.scale_k[:, None]
            if segment.scale_v is not None:
                rotated_v = rotated_v / segment.scale_v[:, None]
            store(rotated_k, rotated_v, LayerCache((segment,)), (batch,))
