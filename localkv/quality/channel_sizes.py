"""How large the channels of q and K are that meet, and those of V, over a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import AttentionSpec, LayerSpec
from localkv.cache.arrays import Array, Batch, LayerCache
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.errors import LocalKVError
from localkv.kernels.backend import Backend, TokenInputs, run_one_by_one
from localkv.kernels.grouped_attention import norm_heads
from localkv.kernels.layer_weights import LayerWeights
from localkv.loader.smoothing import attention_layers, readers
from localkv.model import Transformer
from localkv.quality.channels import TYPE, rows_of

Floats = NDArray[np.float64]
ByLayer = dict[int, Floats]
"""[n_kv_heads, channels] of layers."""


@dataclass(frozen=True)
class ChannelSizes:
    """What `smoothing_of` takes.

    Attributes:
        k: root mean squares of K as it is cached, after RoPE.
        q: those of all queries that meet it, not rotated: RoPE keeps the sum of a pair's squares.
        v: largest magnitudes.
    """

    k: ByLayer
    q: ByLayer
    v: ByLayer


def channel_sizes(
    model: Transformer, chunks: Sequence[Sequence[int]], *, n_ctx: int
) -> ChannelSizes:
    """Of all layers that have K and V of their own.

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

    def add(self, q: Floats, attn: AttentionSpec) -> None:
        """Those of the next layer: [tokens, n_heads, channels]."""
        layer = self.layers[self._calls % len(self.layers)]
        self._calls += 1
        self.n_tokens += len(q) * (layer == self.layers[0])
        squares = np.square(q).sum(0).reshape(attn.n_kv_heads, -1, attn.key_dim).sum(1)
        self.of[layer] = self.of.get(layer, 0.0) + squares


def _watched(model: Transformer, squares: _QuerySquares) -> Transformer:
    """The same model, whose queries are summed. Nothing here refers to it, so it is gone as soon as
    nobody uses it."""
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
