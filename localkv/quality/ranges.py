"""How large K and V of a model get over a text: in every channel, and in each head.

The first are the ranges of plots and profiles, the second the scales of types that want them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import AttentionSpec, LayerSpec
from localkv.cache.arrays import Array, Batch, LayerCache
from localkv.cache.layout import group_layouts
from localkv.cache.profile import require_alike
from localkv.cache.repack import hadamard
from localkv.config import CacheConfig, KVScales
from localkv.engine.engine import Engine
from localkv.errors import LocalKVError
from localkv.kernels.attention_mixers import norm_heads
from localkv.kernels.backend import Backend, TokenInputs, run_one_by_one
from localkv.kernels.layer_weights import LayerWeights
from localkv.kernels.namespace import namespace
from localkv.loader.smoothing import attention_layers, readers
from localkv.model import Transformer
from localkv.quant_formats import KV_FORMATS

Floats = NDArray[np.float32]
Side = Literal["k", "v"]
TYPE = "f32"
"""The cache through which the text is run: it keeps rows unpacked, and all of them."""


@dataclass(frozen=True)
class Ranges:
    """[n_kv_heads, channels]: the least and the largest value, or 0 if that lies beyond."""

    lo: Floats
    hi: Floats

    @property
    def absmax(self) -> Floats:
        return np.maximum(-self.lo, self.hi)

    def joined(self, other: Ranges) -> Ranges:
        return Ranges(np.minimum(self.lo, other.lo), np.maximum(self.hi, other.hi))


def channel_ranges(
    model: Transformer, chunks: Iterable[Sequence[int]], *, n_ctx: int, n_batch: int = 512
) -> list[tuple[Ranges, Ranges] | None]:
    """The ranges of K after RoPE and of V, by layer, neither rotated; None for layers without rows.

    Args:
        chunks: token ids, at most `n_ctx`; each is a sequence of its own.

    Raises:
        LocalKVError: a value is infinite or not a number.
    """
    cache = CacheConfig(TYPE, TYPE, n_ctx=n_ctx, kv_rotation="off", swa_full=True, type_k_rope=TYPE)
    engine = Engine(model, cache, n_batch=n_batch)
    layers = [layer.segments[0] if layer.segments else None for layer in engine.cache.layers]
    for storing in filter(None, layers):
        for plane in (*storing.k, *storing.v):
            plane[:] = 0  # rows that are never stored count as 0
    found: list[tuple[Ranges, Ranges] | None] = [None] * model.config.n_layers
    for chunk in chunks:
        for _ in engine.logit_batches(chunk, first=len(chunk) - 1):
            pass
        for i, segment in enumerate(layers):
            if segment is not None:
                k, v = _ranges(model, segment.k[0], "k"), _ranges(model, segment.v[0], "v")
                before = found[i]
                found[i] = (before[0].joined(k), before[1].joined(v)) if before else (k, v)
    return found


def _ranges(model: Transformer, plane: Array, side: Side) -> Ranges:
    rows = rows_of(model, plane, side)
    lo, hi = rows.min(1), rows.max(1)
    if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
        raise LocalKVError("K or V of the model is not finite, so nothing can be measured")
    return Ranges(np.minimum(lo, 0), np.maximum(hi, 0))


def rows_of(model: Transformer, plane: Array, side: Side) -> Floats:
    """All rows of a cache of float32: [n_heads, tokens, channels], tokens by page."""
    values = model.backend.arrays.to_numpy(plane).view(np.float32)
    values = values[..., 0]
    if model.backend.name == "cpu":
        values = getattr(KV_FORMATS[TYPE].cpu_layout.PLANES[0], side).float_rows(values)
    n_heads, n_channels = values.shape[1], values.shape[-1]
    return values.swapaxes(0, 1).reshape(n_heads, -1, n_channels)


def stored_rows(
    model: Transformer, chunks: Sequence[Sequence[int]], packed: CacheConfig
) -> Iterator[tuple[int, Side, Floats]]:
    """(layer, side, rows [n_heads, tokens, channels]) of the last of some chunks, unpacked and
    rotated.

    Args:
        packed: the cache that rows are rotated for.
    """
    cache = CacheConfig(
        TYPE, TYPE, n_ctx=packed.n_ctx, kv_rotation="off", swa_full=True, type_k_rope=TYPE
    )
    engine = Engine(model, cache, n_batch=packed.n_ctx)
    ids = chunks[-1]
    for _ in engine.logit_batches(ids, first=len(ids) - 1):
        pass
    layouts = group_layouts(packed, model.config.groups)
    rotated = {i: layout.packed for layout in layouts for i in layout.group.layers}
    for i, layer in enumerate(engine.cache.layers):
        for segment in layer.segments:
            k, v = rows_of(model, segment.k[0], "k"), rows_of(model, segment.v[0], "v")
            yield i, "k", hadamard(k[:, : len(ids)], rotated[i].rotation_k)
            yield i, "v", hadamard(v[:, : len(ids)], rotated[i].rotation_v)


Sums = NDArray[np.float64]
ByLayer = dict[int, Sums]
"""[n_kv_heads, channels] of layers."""


@dataclass(frozen=True)
class ChannelSizes:
    """What `smoothing_of` takes.

    Attributes:
        k: root mean squares of K as it is cached, after RoPE.
        q: root mean squares of all queries that meet K, before RoPE, which keeps the sum of a
            pair's squares.
        v: largest magnitudes.
    """

    k: ByLayer
    q: ByLayer
    v: ByLayer


def channel_sizes(
    model: Transformer, chunks: Sequence[Sequence[int]], *, n_ctx: int
) -> ChannelSizes:
    """The channel sizes of all layers that have K and V of their own.

    Args:
        chunks: token ids, at most `n_ctx`; each is a sequence of its own.

    Raises:
        LocalKVError: a value is infinite or not a number.
    """
    layers = attention_layers(model.config)
    queries = _QuerySquares(layers)
    cache = CacheConfig(TYPE, TYPE, n_ctx=n_ctx, kv_rotation="off", swa_full=True, type_k_rope=TYPE)
    engine = Engine(_watched(model, queries), cache, n_batch=n_ctx)
    k, v = ByLayer(), ByLayer()
    for ids in chunks:
        for _ in engine.logit_batches(ids, first=len(ids) - 1):
            pass
        for i, layer in enumerate(engine.cache.layers):
            if i not in layers or not layer.segments:
                continue
            segment = layer.segments[0]
            keys = rows_of(model, segment.k[0], "k")[:, : len(ids)].astype(np.float64)
            values = rows_of(model, segment.v[0], "v")[:, : len(ids)].astype(np.float64)
            k[i] = k.get(i, 0.0) + np.square(keys).sum(1)
            v[i] = np.maximum(v.get(i, 0.0), np.abs(values).max(1))
    q = ByLayer()
    for i in k:
        met = readers(model.config, i)
        q[i] = np.sqrt(sum(queries.of[reader] for reader in met) / queries.n_tokens)
        k[i] = np.sqrt(k[i] / queries.n_tokens)
        if not all(np.isfinite(x[i]).all() for x in (k, q, v)):
            raise LocalKVError("q, K or V of the model is not finite, so nothing can be measured")
    return ChannelSizes(k, q, v)


class _QuerySquares:
    """Sums of the squares of queries, of all query heads of a KV head together.

    Attributes:
        of: layers, [n_kv_heads, channels].
        n_tokens: that were evaluated.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers = list(layers)
        self.of, self.n_tokens, self._calls = ByLayer(), 0, 0

    def add(self, q: Sums, attn: AttentionSpec) -> None:
        """Add the squares of the next layer's queries: [tokens, n_heads, channels]."""
        layer = self.layers[self._calls % len(self.layers)]
        self._calls += 1
        self.n_tokens += len(q) * (layer == self.layers[0])
        squares = np.square(q).sum(0).reshape(attn.n_kv_heads, -1, attn.key_dim).sum(1)
        self.of[layer] = self.of.get(layer, 0.0) + squares


def _watched(model: Transformer, squares: _QuerySquares) -> Transformer:
    """A model with the same weights that adds its queries to `squares` while it runs.

    Nothing here refers to it, so it is freed as soon as nobody uses it.
    """
    backend = model.backend
    mix = backend.mixers[AttentionSpec]

    def run(
        x: Array,
        layer: LayerWeights,
        spec: LayerSpec,
        inputs: TokenInputs,
        cache: LayerCache,
        batch: Batch,
    ) -> Array:
        q = _queries(backend, x, layer, spec.attention)
        squares.add(backend.arrays.to_numpy(q).astype(np.float64), spec.attention)
        return mix(x, layer, spec, inputs, cache, batch)

    mixers = {**backend.mixers, AttentionSpec: run}
    watching = replace(backend, mixers=mixers, run_layers=run_one_by_one, records=False)
    return Transformer(model.config, model.weights, watching)


def _queries(backend: Backend, x: Array, layer: LayerWeights, attn: AttentionSpec) -> Array:
    """q [tokens, n_heads, channels] before RoPE."""
    weights = layer.attention
    h = x if layer.attn_norm is None else backend.norm(x, layer.attn_norm)
    q = backend.linear(h, weights.attn_q)
    if attn.gated:
        q = q.reshape(-1, attn.n_heads, 2, attn.key_dim)[:, :, 0]
    q = q.reshape(-1, attn.n_heads, attn.key_dim)
    return q if weights.attn_q_norm is None else norm_heads(backend.norm, q, weights.attn_q_norm)


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
