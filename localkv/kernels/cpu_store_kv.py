"""Packing new rows of K and V into pages in the CPU's order."""

from __future__ import annotations

import functools

import numpy as np
from torch import Tensor

from localkv.kernels.cpu_kernels import n_threads, run
from localkv.kernels.cpu_page_layout import Side, plane_order
from localkv.kv_cache import LayerCache, SegmentBatch
from localkv.quant_formats.base import QuantFormat

MANY_BYTES = 1 << 16
"""From so many on, a second thread is worth its start."""


@functools.cache
def _orders(fmt: QuantFormat, side: Side) -> tuple[tuple[int, int], ...]:
    orders = [plane_order(fmt, plane, side) for plane in fmt.planes]
    return tuple((order.item_bits, int(order.halves)) for order in orders)


def store_kv_cpu(
    k: Tensor, v: Tensor, cache: LayerCache, batches: tuple[SegmentBatch, ...]
) -> None:
    """Store a batch's rows: k, v [tokens, n_kv_heads, head_dim], each in its segment's types."""
    for segment, batch in zip(cache.segments, batches, strict=True):
        n_rows, n_kv_heads = batch.slots.numel(), k.shape[1]
        if n_rows == 0:
            continue
        kept = list[Tensor]()  # the job holds addresses only
        entries = list[int]()
        sides: tuple[tuple[Side, QuantFormat, tuple[Tensor, ...], Tensor], ...] = (
            ("k", segment.format_k, segment.k, k),
            ("v", segment.format_v, segment.v, v),
        )
        for side, fmt, planes, x in sides:
            rows = (x if n_rows == x.shape[0] else x[batch.tokens]).float()
            for plane, values, order in zip(
                planes, fmt.codec.encode(rows), _orders(fmt, side), strict=True
            ):
                values = values.contiguous()
                kept.append(values)
                row_bytes = plane.shape[3] * plane.shape[4]
                entries += (values.data_ptr(), plane.data_ptr(), row_bytes, *order)
        header = (0, n_kv_heads, n_rows, batch.slots.data_ptr(), len(kept))
        job = np.array([*header, *entries], np.int64)
        many = sum(values.numel() for values in kept) >= MANY_BYTES
        run("cpu_scatter", job.ctypes.data, min(n_threads(), n_kv_heads) if many else 1)
