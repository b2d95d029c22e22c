"""Rows into a cache by the GPU's kernels, as they are."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from localkv.cache.arrays import LayerCache, SegmentBatch
from localkv.kernels.gpu.rope_store import QueryKeySteps, rope_store


def store_kv_gpu(
    k: Tensor, v: Tensor, cache: LayerCache, batches: tuple[SegmentBatch, ...]
) -> None:
    """Store as `kernels.store_kv` does, neither rotated nor scaled by head."""
    plain = (
        replace(segment, rotation_k=0, rotation_v=0, scale_k=None, scale_v=None)
        for segment in cache.segments
    )
    q = k.new_zeros(k.shape)
    rope_store(q, k, v, QueryKeySteps(), LayerCache(tuple(plain)), batches)
