"""Measuring how large K and V of a model get in each head: the scales of types that want them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from localkv.cache.arrays import Array
from localkv.cache.profile import require_alike
from localkv.config import CacheConfig, KVScales
from localkv.engine.engine import Engine
from localkv.errors import LocalKVError
from localkv.kernels.namespace import namespace
from localkv.model import Transformer

TYPE = "f32"
"""The cache through which the text is run: it keeps rows unpacked, and all of them."""


def calibrate(
    model: Transformer,
    chunks: Iterable[Sequence[int]],
    *,
    n_ctx: int,
    kv_rotation: str = "auto",
    n_batch: int = 512,
) -> Iterator[KVScales]:
    """The largest magnitudes so far, after each chunk.

    Args:
        model: weights on a backend.
        chunks: token ids, at most `n_ctx`; each is a sequence of its own.
        kv_rotation: as in `CacheConfig`; "auto" does not rotate, as it does not for the types that
            are scaled by head.
        n_batch: most tokens evaluated at a time.

    Raises:
        LocalKVError: a value is infinite or not a number.
        UsageError: the model's layers are not alike (`require_alike`).
    """
    config = model.config
    require_alike(config)
    cache = CacheConfig(TYPE, TYPE, n_ctx=n_ctx, kv_rotation=kv_rotation, swa_full=True)
    engine = Engine(model, cache, n_batch=n_batch)
    first = engine.cache.layouts[0]
    (spec,), group = first.segments, first.group
    layers = [layer.segments[0] for layer in engine.cache.layers]
    for segment in layers:
        for plane in (*segment.k, *segment.v):
            plane[:] = 0  # rows that are never stored count as 0
    scales = KVScales(
        architecture=config.architecture,
        name=config.name,
        n_layers=config.n_layers,
        n_kv_heads=group.n_kv_heads,
        head_dim=group.key_dim,
        rotation_k=spec.rotation_k,
        rotation_v=spec.rotation_v,
        n_tokens=0,
        absmax_k=((0.0,) * group.n_kv_heads,) * config.n_layers,
        absmax_v=((0.0,) * group.n_kv_heads,) * config.n_layers,
    )
    for chunk in chunks:
        for _ in engine.logit_batches(chunk, first=len(chunk) - 1):
            pass
        scales = replace(
            scales,
            n_tokens=scales.n_tokens + len(chunk),
            absmax_k=_larger(scales.absmax_k, [_absmax(segment.k) for segment in layers]),
            absmax_v=_larger(scales.absmax_v, [_absmax(segment.v) for segment in layers]),
        )
        yield scales


def _absmax(planes: tuple[Array, ...]) -> list[float]:
    """The largest magnitude of each KV head in all pages.

    A backend may order a page's values as it likes, but each lies in the region of its head.
    """
    xp = namespace(planes[0])
    values = planes[0].view(xp.float32)  # [n_pages, n_kv_heads, PAGE_TOKENS, head_dim, 1]
    absmax: list[float] = xp.amax(xp.abs(values), axis=(0, 2, 3, 4)).tolist()
    if not all(map(math.isfinite, absmax)):
        raise LocalKVError("K or V of the model is not finite, so its scales can't be measured")
    return absmax


def _larger(
    before: tuple[tuple[float, ...], ...], now: list[list[float]]
) -> tuple[tuple[float, ...], ...]:
    """The larger of two tables, entry by entry."""
    pairs = zip(before, now, strict=True)
    return tuple(tuple(map(max, old, new)) for old, new in pairs)
