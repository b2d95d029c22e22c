"""The least and the largest value of every channel of K and V of a model, over a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Array
from localkv.cache.layout import group_layouts
from localkv.cache.repack import hadamard
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.errors import LocalKVError
from localkv.formats import KV_FORMATS
from localkv.model import Transformer

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
    """Those of K and of V in each layer, K after RoPE, neither rotated; None without rows.

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
