"""Attention over latents that every implementation must get right, on random rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localkv.arch.spec import AttentionParams, CacheGroup
from localkv.cache.arrays import Array, Arrays, Batch, Segment
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import GroupLayout, SegmentSpec
from localkv.kernels.attention import Rotate, StoreKV, store_rotated
from localkv.kernels.attention_mixers import SegmentLatents, attend
from localkv.quant_formats import TOKEN_FORMATS


@dataclass
class Latents:
    """Sequences of (past, new) tokens with random rows in a cache, and queries of the new ones."""

    cache: KVCache
    batch: Batch
    q: Array
    q_rotated: Array
    want: np.ndarray

    @property
    def segment(self) -> Segment:
        return self.cache.layers[0].segments[0]


def hadamard(n: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(n)


def turned(x: np.ndarray, block: int) -> np.ndarray:
    """Rows times the Hadamard matrix in blocks; 0 leaves them."""
    if not block:
        return x
    return (x.reshape(-1, block) @ hadamard(block)).reshape(x.shape)


def as_stored(x: np.ndarray, type_name: str, rotation: int) -> np.ndarray:
    """Rows as a cache of a type has to return them, turned back."""
    codec = TOKEN_FORMATS[type_name].codec
    rows = turned(x, rotation).astype(np.float32)
    return turned(codec.decode(codec.encode(rows)).astype(np.float64), rotation)


def exact(
    q: np.ndarray,
    q_rotated: np.ndarray,
    rows: list[tuple[np.ndarray, np.ndarray]],
    scale: float,
    lengths: list[tuple[int, int]],
    softcap: float = 0.0,
) -> np.ndarray:
    """In float64: each new token's heads over the rows of its sequence up to its own."""
    out, at = np.zeros(q.shape), 0
    for (latents, rotated), (past, new) in zip(rows, lengths, strict=True):
        for i in range(new):
            end = past + i + 1
            logits = q[at] @ latents[:end].T + q_rotated[at] @ rotated[:end].T
            logits = logits * scale
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            out[at] = weights @ latents[:end] / weights.sum(-1, keepdims=True)
            at += 1
    return out


def random_latents(
    arrays: Arrays,
    store: StoreKV,
    rotate: Rotate,
    *,
    n_heads: int,
    latent_dim: int,
    rope_dim: int,
    lengths: list[tuple[int, int]],
    spec: SegmentSpec,
    params: AttentionParams,
    generated: bool = False,
) -> Latents:
    """Rows are stored by `store`, and rows of the past in a batch of their own."""
    generator = np.random.default_rng(5)
    group = CacheGroup(1, latent_dim, rope_dim, 0, (0,), is_latent=True)
    cache = KVCache(
        [GroupLayout(group, (spec,))], n_ctx=1024, n_sequences=len(lengths), arrays=arrays
    )
    for plane in (*cache.layers[0].segments[0].k, *cache.layers[0].segments[0].v):
        plane[:] = 0xFF
    generator.shuffle(cache.pools[0].free)
    sequences = [cache.new_sequence() for _ in lengths]
    rows = [
        (generator.standard_normal((n, latent_dim)), generator.standard_normal((n, rope_dim)))
        for n in (past + new for past, new in lengths)
    ]

    def stored(batch: Batch, parts: list[tuple[np.ndarray, np.ndarray]]) -> None:
        k, v = (
            arrays.from_numpy(np.concatenate(side).astype(np.float32)[:, None])
            for side in zip(*parts, strict=True)
        )
        layer = cache.layers[0]
        store_rotated(store, rotate, k, v, layer, layer.rows_of(batch))

    pasts = [(s, [0] * past) for s, (past, _) in zip(sequences, lengths, strict=True) if past]
    if pasts:
        halves = [(k[:past], v[:past]) for (k, v), (past, _) in zip(rows, lengths, strict=True)]
        stored(cache.batch(pasts), [half for half in halves if len(half[0])])
    for sequence, (past, _) in zip(sequences, lengths, strict=True):
        sequence.length = past
    news = [(s, [0] * new) for s, (_, new) in zip(sequences, lengths, strict=True)]
    batch = cache.batch(news, generated=generated)
    stored(batch, [(k[past:], v[past:]) for (k, v), (past, _) in zip(rows, lengths, strict=True)])
    n_new = sum(new for _, new in lengths)
    q = generator.standard_normal((n_new, n_heads, latent_dim)).astype(np.float32)
    q_rotated = generator.standard_normal((n_new, n_heads, rope_dim)).astype(np.float32)
    kept = [
        (as_stored(k, spec.type_k, spec.rotation_k), as_stored(v, spec.type_v, spec.rotation_v))
        for k, v in rows
    ]
    want = exact(q, q_rotated, kept, params.softmax_scale, lengths, params.softcap)
    return Latents(cache, batch, arrays.from_numpy(q), arrays.from_numpy(q_rotated), want)


def attended(
    run: SegmentLatents, rotate: Rotate, made: Latents, params: AttentionParams, arrays: Arrays
) -> np.ndarray:
    """Sums of latents of the new tokens: [tokens, n_heads, latent_dim]."""
    layer = made.cache.layers[0]
    out = attend(run, made.q, made.q_rotated, layer, made.batch, params, rotate=rotate)
    return np.asarray(arrays.to_numpy(out), np.float64)
