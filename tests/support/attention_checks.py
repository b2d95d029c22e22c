"""Checks that every implementation of attention must pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams
from localkv.cache.layout import SegmentSpec
from localkv.config import KVScales
from localkv.kernels.attention import SegmentAttention, StoreKV, attention, store_rotated
from localkv.kernels.reference.backend import hadamard_transform, store_kv
from localkv.kernels.reference.torch_arrays import decode, encode
from localkv.quant_formats import TOKEN_FORMATS
from support.torch_edge import torch_cache


def plain(
    q: Tensor, k: Tensor, v: Tensor, past: int, params: AttentionParams, slope: float = 0.0
) -> Tensor:
    """One head, one sequence: q [new, d], k and v [past + new, d], in their own dtype."""
    rows = []
    for i in range(q.shape[0]):
        end = past + i + 1
        first = max(0, end - params.window) if params.window else 0
        if params.chunk:
            first = (past + i) - (past + i) % params.chunk
        seen = slice(first, end)
        logits = k[seen] @ q[i] * params.softmax_scale
        if params.softcap:
            logits = params.softcap * torch.tanh(logits / params.softcap)
        logits = logits - slope * torch.arange(end - first - 1, -1, -1)
        weights = torch.exp(logits - logits.max())
        rows.append(weights @ v[seen] / weights.sum())
    return torch.stack(rows)


Rounding = Callable[[str, str], float]
"""What an implementation is off by, from the types of K and V, relative to all results together, as
it rounds what it multiplies them with."""


def exactly(type_k: str, type_v: str) -> float:
    return 0.0


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
    chunk: int = 0,
    alibi: float = 0.0,
    store: StoreKV = store_kv,
    rounding: Rounding = exactly,
) -> None:
    """Random rows for sequences of (past, new) tokens; error at most twice plain float32's, and for
    generated tokens `rounding` of the result more.

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
    cache = torch_cache(
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
        fmt = TOKEN_FORMATS[name]
        scale = torch.ones(n_kv_heads, 1)
        if fmt.scales_by_head:
            scale = torch.tensor(absmax)[:, None] / fmt.largest
        stored = decode(fmt, encode(fmt, hadamard_transform(x, rotation) / scale))
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
            hadamard_transform,
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
    store_rotated(store, hadamard_transform, new_k, new_v, layer, batch.segments)
    q = 3 * torch.randn(batch.starts[-1], n_kv_heads * group, head_dim, generator=generator)
    params = AttentionParams(1 / math.sqrt(head_dim), window, softcap, chunk, alibi)
    slopes = params.slopes(q.shape[1]) if alibi else [0.0] * q.shape[1]
    outputs = []
    for generated in (False, True):  # a token may be of either kind
        kinds = replace(batch, generated=(generated,) * len(lengths))
        outputs.append(attention(run, q, layer, kinds, params, rotate=hadamard_transform))
        assert outputs[-1].shape == q.shape
    ks = [rounded(k, type_k, rotations[0], absmax) for k in ks]
    vs = [rounded(v, type_v, rotations[1], absmax[::-1]) for v in vs]
    ours, theirs, exact = ([], []), [], []
    for i, (past, _) in enumerate(lengths):
        rows = slice(batch.starts[i], batch.starts[i + 1])
        for head in range(n_kv_heads * group):
            args = (q[rows, head], ks[i][:, head // group], vs[i][:, head // group])
            exact.append(plain(*(x.double() for x in args), past, params, slopes[head]))
            theirs.append(plain(*(x.float() for x in args), past, params, slopes[head]))
            for parts, got in zip(ours, outputs, strict=True):
                parts.append(got[rows, head])
    want = torch.cat(exact)
    *errors, plain_error = (float((torch.cat(x) - want).norm()) for x in (*ours, theirs))
    # of one row, in which a few keys weigh most, rounding is a matter of luck: products of 32
    # channels that are added one after the other are off by some 0.4 * 2^-24 * sqrt(32 / 3) of a
    # logit, which is up to 9 here, so weights and the output by 6e-7
    bound = 2 * plain_error + 1e-6 * float(want.norm())
    of_prompts, of_generated = errors
    assert of_prompts <= bound
    assert of_generated <= bound + rounding(type_k, type_v) * float(want.norm())


WINDOWED_LENGTHS = [[(600, 1)], [(700, 40)], [(256, 1), (0, 90), (1023, 3)]]
"""Few and many new tokens, one sequence and several."""


def check_windows(
    run: SegmentAttention,
    *,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    store: StoreKV = store_kv,
    rounding: Rounding = exactly,
) -> None:
    """Windows or chunks, with and without a cap, in one segment and in several."""
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
                chunk=chunk,
                store=store,
                rounding=rounding,
            )


def check_rows_without_keys(run: SegmentAttention, store: StoreKV = store_kv) -> None:
    """A window that has left a segment, or that is about to: output 0, log-sum-exp -inf."""
    specs = [SegmentSpec("f32", "f32", 0), SegmentSpec("f32", "f32", 40)]
    cache = torch_cache(n_layers=1, n_kv_heads=1, head_dim=32, segments=specs, n_ctx=400)
    layer = cache.layers[0]
    generator = torch.Generator().manual_seed(0)
    sequence = cache.new_sequence()
    for n_new, window in ((100, 8), (1, 8), (30, 62), (1, 300)):
        batch = cache.batch([(sequence, [0] * n_new)], generated=n_new < 100)
        q, k, v = (torch.randn(n_new, 1, 32, generator=generator) for _ in range(3))
        store_rotated(store, hadamard_transform, k, v, layer, batch.segments)
        sequence.length += n_new
        for i, (first, end) in enumerate(((0, 40), (40, 400))):
            params = AttentionParams(0.2, window)
            out, lse = run(q, layer.segments[i], batch.segments[i], batch, params)
            blind = (batch.positions < first) | (batch.positions - window + 1 >= end)
            assert (out[blind] == 0).all()
            assert (lse[blind] == -torch.inf).all()
            assert lse[~blind].isfinite().all()
        assert attention(run, q, layer, batch, params, rotate=hadamard_transform).isfinite().all()
