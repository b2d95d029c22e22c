"""Runs a model over ids, and says how far its logits are from others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import GroupLayout, SegmentSpec
from localkv.cache.pages import PagePool
from localkv.config import KVScales
from localkv.kernels.backend import Backend
from localkv.loader.gguf_file import GGUFFile
from localkv.loader.weights import load_model
from localkv.model import Transformer
from support.layouts import with_attention

IDS = [(i * 37 + 11) % 96 for i in range(100)]
CONFORMANCE_IDS = [(i * 7919 + 13) % 256 for i in range(300)]


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(((got - want) ** 2).sum() / (want**2).sum())


def new_cache(
    model: Transformer,
    *segments: SegmentSpec,
    n_ctx: int = 1024,
    n_batch: int | None = None,
    n_sequences: int = 1,
    kv_scales: KVScales | None = None,
) -> KVCache:
    """A cache full of bytes that decode to NaN, with its pages in no order.

    Pages that are given back get such bytes again.
    """
    layouts = [GroupLayout(group, segments) for group in model.config.groups]
    cache = KVCache(
        layouts,
        arrays=model.backend.arrays,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_sequences=n_sequences,
        kv_scales=kv_scales,
        states=model.config.states,
    )
    for part in cache.states.parts:
        part.data[:] = np.nan
    generator = np.random.default_rng(1)
    for pool in cache.pools:
        _spoil(cache, pool, pool.free)
        generator.shuffle(pool.free)
        pool.give_back = partial(_give_back, cache, pool)  # type: ignore[method-assign]
    return cache


def _spoil(cache: KVCache, pool: PagePool, pages: Sequence[int]) -> None:
    for layer in cache.layers:
        for rows, segment in zip(cache.parts[layer.part :], layer.segments, strict=False):
            if rows.pool == pool.index:
                for plane in (*segment.k, *segment.v):
                    plane[list(pages)] = 0xFF


def _give_back(cache: KVCache, pool: PagePool, pages: Sequence[int]) -> None:
    _spoil(cache, pool, [page for page in pages if pool.n_holders[page] == 1])
    PagePool.give_back(pool, pages)


def with_params(model: Transformer, **changes: Any) -> Transformer:
    """The model with other `AttentionParams` in all layers."""
    params = replace(model.config.layers[0].attention.params, **changes)
    return Transformer(with_attention(model.config, params=params), model.weights, model.backend)


def run(model: Transformer, cache: KVCache, ids: list[int], chunk: int = 512) -> np.ndarray:
    sequence = cache.new_sequence()
    rows = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        out = model.forward(cache.batch([(sequence, part)], logits="all"), cache)
        rows.append(model.backend.arrays.to_numpy(out))
        sequence.length += len(part)
    return np.concatenate(rows).astype(np.float64)


def run_together(
    model: Transformer, segments: Sequence[SegmentSpec], parts: Sequence[list[int]]
) -> np.ndarray:
    """The last logits of several sequences, evaluated in two batches: [len(parts), n_vocab]."""
    cache = new_cache(model, *segments, n_ctx=512, n_sequences=len(parts))
    sequences = [cache.new_sequence() for _ in parts]
    half = [len(ids) // 2 for ids in parts]
    first = [(s, ids[:n]) for s, ids, n in zip(sequences, parts, half, strict=True) if n]
    model.forward(cache.batch(first), cache)
    for sequence, n in zip(sequences, half, strict=True):
        sequence.length += n
    rest = [(s, ids[n:]) for s, ids, n in zip(sequences, parts, half, strict=True)]
    out = model.forward(cache.batch(rest), cache)
    return model.backend.arrays.to_numpy(out).astype(np.float64)


def logits(
    path: Path | GGUFFile, backend: Backend, ids: list[int], types: str, chunk: int = 512
) -> np.ndarray:
    model, unused = load_model(path, backend)
    assert unused == []
    return run(model, new_cache(model, SegmentSpec(types, types)), ids, chunk)
