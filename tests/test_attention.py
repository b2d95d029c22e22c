"""Attention over the paged cache against softmax as it is written in the books."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cache_types import NAMES, PAIRS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import SegmentSpec
from localkv.config import AttentionParams, KVScales
from localkv.formats import KV_FORMATS
from localkv.kernels.attention import (
    SegmentAttention,
    attention,
    attention_reference,
)
from localkv.kernels.hadamard import hadamard_transform
from localkv.kernels.store_kv import StoreKV, store_kv, store_rotated


def plain(q: Tensor, k: Tensor, v: Tensor, past: int, params: AttentionParams) -> Tensor:
    """One head, one sequence: q [new, d], k and v [past + new, d], in their own dtype."""
    rows = []
    for i in range(q.shape[0]):
        end = past + i + 1
        seen = slice(max(0, end - params.window) if params.window else 0, end)
        logits = k[seen] @ q[i] * params.softmax_scale
        if params.softcap:
            logits = params.softcap * torch.tanh(logits / params.softcap)
        weights = torch.exp(logits - logits.max())
        rows.append(weights @ v[seen] / weights.sum())
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
    window: int = 0,
    softcap: float = 0.0,
    store: StoreKV = store_kv,
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
    params = AttentionParams(1 / math.sqrt(head_dim), window, softcap)
    outputs = []
    for generated in (False, True):  # a token may be of either kind
        kinds = replace(batch, generated=(generated,) * len(lengths))
        outputs.append(attention(run, q, layer, kinds, params))
        assert outputs[-1].shape == q.shape
    ks = [rounded(k, type_k, rotations[0], absmax) for k in ks]
    vs = [rounded(v, type_v, rotations[1], absmax[::-1]) for v in vs]
    ours, theirs, exact = ([], []), [], []
    for i, (past, _) in enumerate(lengths):
        rows = slice(batch.starts[i], batch.starts[i + 1])
        for head in range(n_kv_heads * group):
            args = (q[rows, head], ks[i][:, head // group], vs[i][:, head // group])
            exact.append(plain(*(x.double() for x in args), past, params))
            theirs.append(plain(*(x.float() for x in args), past, params))
            for parts, got in zip(ours, outputs, strict=True):
                parts.append(got[rows, head])
    want = torch.cat(exact)
    *errors, plain_error = (float((torch.cat(x) - want).norm()) for x in (*ours, theirs))
    # of one row, in which a single key may weigh most, rounding is a matter of luck
    assert max(errors) <= 2 * plain_error + 5e-7 * float(want.norm())


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
    got = attention(attention_reference, 3 * q, cache.layers[0], batch, AttentionParams(0.125))
    want = plain(*(x[:, 0].double() for x in (3 * q, k, v)), 0, AttentionParams(0.125))
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

    params = AttentionParams(0.3)

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
        got = attention(attention_reference, q, cache.layers[0], batch, params)
        worst = 0.0
        for head in range(3 * group):
            args = (q[:, head], k[:, head // group], v[:, head // group])
            want = plain(*(x.double() for x in args), 0, params)
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


WINDOWED_LENGTHS = [[(600, 1)], [(700, 40)], [(256, 1), (0, 90), (1023, 3)]]
"""Few and many new tokens, one sequence and several."""


def check_windows(
    run: SegmentAttention, *, window: int, softcap: float, store: StoreKV = store_kv
) -> None:
    """Windows with and without a cap, in one segment and in several."""
    for lengths in WINDOWED_LENGTHS:
        for bounds in ((0,), (0, 10, 300)):
            check(
                run,
                head_dim=64,
                n_kv_heads=2,
                group=3,
                lengths=lengths,
                type_k="q8_0",
                type_v="f16",
                bounds=bounds,
                window=window,
                softcap=softcap,
                store=store,
            )


def check_rows_without_keys(run: SegmentAttention, store: StoreKV = store_kv) -> None:
    """A window that has left a segment, or that is about to: output 0, log-sum-exp -inf."""
    specs = [SegmentSpec("f32", "f32", 0), SegmentSpec("f32", "f32", 40)]
    cache = KVCache(n_layers=1, n_kv_heads=1, head_dim=32, segments=specs, n_ctx=400)
    layer = cache.layers[0]
    generator = torch.Generator().manual_seed(0)
    sequence = cache.new_sequence()
    for n_new, window in ((100, 8), (1, 8), (30, 62), (1, 300)):
        batch = cache.batch([(sequence, [0] * n_new)], generated=n_new < 100)
        q, k, v = (torch.randn(n_new, 1, 32, generator=generator) for _ in range(3))
        store_rotated(store, k, v, layer, batch.segments)
        sequence.length += n_new
        for i, (first, end) in enumerate(((0, 40), (40, 400))):
            params = AttentionParams(0.2, window)
            out, lse = run(q, layer.segments[i], batch.segments[i], batch, params)
            blind = (batch.positions < first) | (batch.positions - window + 1 >= end)
            assert (out[blind] == 0).all()
            assert (lse[blind] == -torch.inf).all()
            assert lse[~blind].isfinite().all()
        assert attention(run, q, layer, batch, params).isfinite().all()


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 256, 300, 5000])
def test_window(window: int) -> None:
    check_windows(attention_reference, window=window, softcap=0.0)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap(softcap: float) -> None:
    check_windows(attention_reference, window=0, softcap=softcap)
    check_windows(attention_reference, window=100, softcap=softcap)


def test_rows_without_keys() -> None:
    check_rows_without_keys(attention_reference)


def test_negative_params_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        AttentionParams(1.0, window=-1)
    with pytest.raises(ValueError, match="negative"):
        AttentionParams(1.0, softcap=-1.0)
