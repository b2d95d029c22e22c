"""Attention over the paged cache against softmax as it is written in the books."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from cache_types import BY_HEAD, BY_ROW, NAMES, PAIRS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localkv.cache_layout import SegmentSpec
from localkv.config import KVScales
from localkv.kernels.attention import (
    SegmentAttention,
    attention,
    attention_reference,
)
from localkv.kernels.hadamard import hadamard_transform
from localkv.kernels.store_kv import store_kv, store_rotated
from localkv.kv_cache import KVCache, LayerCache, SegmentBatch
from localkv.quant_formats import KV_FORMATS


def plain(q: Tensor, k: Tensor, v: Tensor, past: int, scale: float) -> Tensor:
    """One head, one sequence: q [new, d], k and v [past + new, d], in their own dtype."""
    rows = []
    for i in range(q.shape[0]):
        logits = k[: past + i + 1] @ q[i] * scale
        weights = torch.exp(logits - logits.max())
        rows.append(weights @ v[: past + i + 1] / weights.sum())
    return torch.stack(rows)


def check(
    run: SegmentAttention,
    *,
    head_dim: int,
    n_kv_heads: int,
    group: int,
    lengths: list[tuple[int, int]],
    type_k: str = "f32",
    type_v: str = "f32",
    bounds: tuple[int, ...] = (0,),
    rotations: tuple[int, int] = (0, 0),
    store: Callable[[Tensor, Tensor, LayerCache, tuple[SegmentBatch, ...]], None] = store_kv,
) -> None:
    """Random rows for sequences of (past, new) tokens; error at most twice plain float32's.

    What plain attention gets are the rows as the cache has to return them. In types that are
    scaled by head, each head has a scale of its own.
    """
    generator = torch.Generator().manual_seed(head_dim * 1000 + group)
    specs = [SegmentSpec(type_k, type_v, first, *rotations) for first in bounds]
    n_ctx = max(past + new for past, new in lengths)
    absmax = tuple(30.0 * 3**head for head in range(n_kv_heads))
    scales = KVScales(
        "llama", "", 1, n_kv_heads, head_dim, *rotations, 1, (absmax,), (absmax[::-1],)
    )
    cache = KVCache(
        n_layers=1,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        segments=specs,
        n_ctx=n_ctx,
        n_sequences=len(lengths),
        kv_scales=scales,
    )
    layer = cache.layers[0]
    for segment, pool in zip(layer.segments, cache.pools, strict=True):
        pool.free.reverse()
        for plane in (*segment.k, *segment.v):
            plane.fill_(0xFF)  # NaN in every type

    def random_rows(n_tokens: int) -> Tensor:
        return torch.randn(n_tokens, n_kv_heads, head_dim, generator=generator)

    def rounded(x: Tensor, name: str, rotation: int, absmax: tuple[float, ...]) -> Tensor:
        fmt = KV_FORMATS[name]
        scale = torch.ones(n_kv_heads, 1)
        if fmt.scales_by_head:
            scale = torch.tensor(absmax)[:, None] / fmt.largest
        stored = fmt.codec.decode(fmt.codec.encode(hadamard_transform(x, rotation) / scale))
        return hadamard_transform(stored.double() * scale.double(), rotation)

    sequences = [cache.new_sequence() for _ in lengths]
    ks = [random_rows(past + new) for past, new in lengths]
    vs = [random_rows(past + new) for past, new in lengths]
    past_parts = [(s, [0] * past) for s, (past, _) in zip(sequences, lengths, strict=True) if past]
    if past_parts:
        batch = cache.batch(past_parts)
        pasts = [(i, past) for i, (past, _) in enumerate(lengths) if past]
        store_rotated(
            store,
            torch.cat([ks[i][:past] for i, past in pasts]),
            torch.cat([vs[i][:past] for i, past in pasts]),
            layer,
            batch.segments,
        )
    for sequence, (past, _) in zip(sequences, lengths, strict=True):
        sequence.length = past
    parts = [(s, [0] * new) for s, (_, new) in zip(sequences, lengths, strict=True)]
    batch = cache.batch(parts)
    new_k = torch.cat([k[past:] for k, (past, _) in zip(ks, lengths, strict=True)])
    new_v = torch.cat([v[past:] for v, (past, _) in zip(vs, lengths, strict=True)])
    store_rotated(store, new_k, new_v, layer, batch.segments)
    q = 3 * torch.randn(batch.starts[-1], n_kv_heads * group, head_dim, generator=generator)
    scale = 1 / math.sqrt(head_dim)
    got = attention(run, q, layer, batch, scale)
    assert got.shape == q.shape
    ks = [rounded(k, type_k, rotations[0], absmax) for k in ks]
    vs = [rounded(v, type_v, rotations[1], absmax[::-1]) for v in vs]
    worst_ours = worst_plain = 0.0
    for i, (past, _) in enumerate(lengths):
        rows = slice(batch.starts[i], batch.starts[i + 1])
        for head in range(n_kv_heads * group):
            args = (q[rows, head], ks[i][:, head // group], vs[i][:, head // group])
            want = plain(*(x.double() for x in args), past, scale)
            narrow = plain(*(x.float() for x in args), past, scale)
            worst_ours = max(worst_ours, float((got[rows, head] - want).abs().max()))
            worst_plain = max(worst_plain, float((narrow - want).abs().max()))
    # to rotate or scale q and the output, or a row's logit, rounds them, too
    times = 6 if any(rotations) or {type_k, type_v} & {*BY_HEAD, *BY_ROW} else 2
    assert worst_ours <= times * worst_plain + 1e-6


@pytest.mark.parametrize("group", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_shapes(head_dim: int, group: int) -> None:
    check(
        attention_reference, head_dim=head_dim, n_kv_heads=2, group=group, lengths=[(9, 1), (0, 7)]
    )


@pytest.mark.parametrize(("type_k", "type_v"), PAIRS)
def test_every_type(type_k: str, type_v: str) -> None:
    check(
        attention_reference,
        head_dim=64,
        n_kv_heads=2,
        group=2,
        lengths=[(300, 3)],
        type_k=type_k,
        type_v=type_v,
    )


@pytest.mark.parametrize("type_k", NAMES)
def test_rotated(type_k: str) -> None:
    for rotations in ((128, 64), (128, 0), (0, 64)):
        check(
            attention_reference,
            head_dim=128,
            n_kv_heads=2,
            group=2,
            lengths=[(280, 3), (0, 2)],
            type_k=type_k,
            type_v="q5_1",
            bounds=(0, 100),
            rotations=rotations,
        )


def test_segments_that_are_not_rotated_alike() -> None:
    """Queries turn for each segment, and its output turns back before segments are merged."""
    head_dim = 64
    specs = [
        SegmentSpec("f32", "f32", 0),
        SegmentSpec("f32", "f32", 10, 64, 64),
        SegmentSpec("f32", "f32", 300, 32, 0),
        SegmentSpec("f32", "f32", 310, 0, 64),
    ]
    cache = KVCache(n_layers=1, n_kv_heads=1, head_dim=head_dim, segments=specs, n_ctx=400)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(330, 1, head_dim, generator=generator) for _ in range(3))
    batch = cache.batch([(cache.new_sequence(), [0] * 330)])
    store_rotated(store_kv, k, v, cache.layers[0], batch.segments)
    got = attention(attention_reference, 3 * q, cache.layers[0], batch, 0.125)
    want = plain(*(x[:, 0].double() for x in (3 * q, k, v)), 0, 0.125)
    assert float((got[:, 0] - want).abs().max()) < 1e-5


@pytest.mark.parametrize("length", [1, 255, 256, 257, 1023, 1024, 1025, 2100])
def test_lengths_around_pages_and_tiles(length: int) -> None:
    check(attention_reference, head_dim=32, n_kv_heads=1, group=1, lengths=[(length - 1, 1)])
    if length > 40:
        check(attention_reference, head_dim=32, n_kv_heads=1, group=1, lengths=[(length - 40, 40)])


def test_scales_of_heads_bring_rows_into_range() -> None:
    """Rows far beyond and far below the range of fp8 come out as ordinary ones do."""
    head_dim, group = 32, 2
    sizes_k, sizes_v = torch.tensor([1e5, 1e-6, 1.0]), torch.tensor([1e-7, 3.0, 1e6])
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(50, 3 * group, head_dim, generator=generator)
    q = q / sizes_k.repeat_interleave(group)[:, None]
    k, v = (torch.randn(50, 3, head_dim, generator=generator) for _ in range(2))
    k, v = k * sizes_k[:, None], v * sizes_v[:, None]
    absmax = [tuple(x.abs().amax((0, 2)).tolist()) for x in (k, v)]
    scales = KVScales("llama", "", 1, 3, head_dim, 0, 0, 50, (absmax[0],), (absmax[1],))

    def error(name: str) -> float:
        cache = KVCache(
            n_layers=1,
            n_kv_heads=3,
            head_dim=head_dim,
            segments=[SegmentSpec(name, name)],
            n_ctx=50,
            kv_scales=scales,
        )
        batch = cache.batch([(cache.new_sequence(), [0] * 50)])
        store_rotated(store_kv, k, v, cache.layers[0], batch.segments)
        got = attention(attention_reference, q, cache.layers[0], batch, 0.3)
        worst = 0.0
        for head in range(3 * group):
            args = (q[:, head], k[:, head // group], v[:, head // group])
            want = plain(*(x.double() for x in args), 0, 0.3)
            worst = max(worst, float((got[:, head] - want).norm() / want.norm()))
        return worst

    assert error("fp8_e4m3_head") < 0.06
    assert error("fp8_e4m3_token") < 0.06
    assert error("fp8_e5m2_head") < 0.12
    assert error("fp8_e4m3") > 0.5


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 20)), min_size=1, max_size=4),
    bounds=st.sampled_from([(0,), (0, 1), (0, 4, 260), (0, 256, 512)]),
    n_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
)
def test_ragged_batches(
    lengths: list[tuple[int, int]],
    bounds: tuple[int, ...],
    n_kv_heads: int,
    group: int,
) -> None:
    check(
        attention_reference,
        head_dim=32,
        n_kv_heads=n_kv_heads,
        group=group,
        lengths=lengths,
        bounds=bounds,
    )
