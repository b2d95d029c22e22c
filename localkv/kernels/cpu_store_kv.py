"""Packing new rows of K and V into pages in the CPU's order."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from localkv.kernels.cpu_kernels import n_threads, run
from localkv.kernels.cpu_page_layout import Side, plane_order
from localkv.kv_cache import LayerCache, SegmentBatch
from localkv.quant_formats.base import QuantFormat

MANY_BYTES = 1 << 16
"""From so many on, a second thread is worth its start."""
FEW_ROWS = 16
"""Up to so many rows the cost of encoding is that of calling torch, so K and V share the calls."""


@functools.cache
def _orders(fmt: QuantFormat, side: Side) -> tuple[tuple[int, int], ...]:
    orders = [plane_order(fmt, plane, side) for plane in fmt.all_planes]
    return tuple((order.item_bits, int(order.halves)) for order in orders)


def store_kv_cpu(
    k: Tensor, v: Tensor, cache: LayerCache, batches: tuple[SegmentBatch, ...]
) -> None:
    """Store a batch's rows: k, v [tokens, n_kv_heads, head_dim], each in its segment's types."""
    for segment, batch in zip(cache.segments, batches, strict=True):
        n_rows, n_kv_heads = batch.slots.numel(), k.shape[1]
        if n_rows == 0:
            continue
        rows_k, rows_v = ((x if n_rows == x.shape[0] else x[batch.tokens]).float() for x in (k, v))
        fmt_k, fmt_v = segment.format_k, segment.format_v
        if fmt_k is fmt_v and n_rows <= FEW_ROWS:
            both = fmt_k.codec.encode(torch.stack((rows_k, rows_v)))
            encoded_k, encoded_v = (tuple(plane[i] for plane in both) for i in range(2))
        else:
            encoded_k, encoded_v = fmt_k.codec.encode(rows_k), fmt_v.codec.encode(rows_v)
        kept = list[Tensor]()  # the job holds addresses only
        entries = list[int]()
        for encoded, planes, orders in (
            (encoded_k, segment.k, _orders(fmt_k, "k")),
            (encoded_v, segment.v, _orders(fmt_v, "v")),
        ):
            for values, plane, order in zip(encoded, planes, orders, strict=True):
                kept.append(values.contiguous())
                row_bytes = plane.shape[3] * plane.shape[4]
                entries += (kept[-1].data_ptr(), plane.data_ptr(), row_bytes, *order)
        header = (0, n_kv_heads, n_rows, batch.slots.data_ptr(), len(kept))
        many = sum(values.numel() for values in kept) >= MANY_BYTES
        run("cpu_scatter", (*header, *entries), min(n_threads(), n_kv_heads) if many else 1)
