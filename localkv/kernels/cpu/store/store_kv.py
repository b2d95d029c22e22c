"""Packing new rows of K and V into pages in the CPU's order."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import LayerCache, Segment, SegmentBatch
from localkv.kernels.bounds import BoundsError, check_segment, check_slots
from localkv.kernels.cpu.addresses import Floats
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.runtime.chain import Chain, Memory, Scratch, Where
from localkv.kernels.cpu.store.group_store import add_groups, new_groups, packs_groups
from localkv.kernels.cpu.store.job import StoreJob
from localkv.kernels.cpu.store.plane_jobs import plane_jobs
from localkv.quant_formats.base import QuantFormat
from localkv.system.threads import n_threads

MANY_ROWS = 16
"""From this number on, a second thread is worth its start."""


def store_source(fmt: QuantFormat) -> KernelSource:
    """The kernel that encodes a type's rows."""
    return KernelSource("store/store_rows", {"FORMAT": fmt.codec_name})


@functools.cache
def _store_worker(fmt: QuantFormat) -> int:
    return specialized(store_source(fmt))["worker"]


def _widths(segment: Segment) -> tuple[int, int]:
    """Channels of a row of K and of V."""
    k, v = (
        planes[0].shape[3] * fmt.block_size
        for fmt, planes in ((segment.format_k, segment.k), (segment.format_v, segment.v))
    )
    return k, v


def add_store(
    chain: Chain, k: Where, v: Where, n_tokens: int, cache: LayerCache, *, rotate: bool = True
) -> None:
    """Store k, v (float32 [tokens, n_kv_heads, head_dim]) in every segment of a cache, and then
    pack the groups that they complete.

    When the chain runs, it is given `stored_rows`.
    """
    threads = n_threads() if n_tokens >= MANY_ROWS else 1
    for i, segment in enumerate(cache.segments):
        if packs_groups(segment) or segment.is_whole or chain.bound.get(f"rows{i}") == 0:
            continue
        check_segment(segment, *_widths(segment), pages_apart=True)
        for side, x, fmt, planes, rotation, codebook in (
            ("k", k, segment.format_k, segment.k, segment.rotation_k, segment.codebook_k),
            ("v", v, segment.format_v, segment.v, segment.rotation_v, segment.codebook_v),
        ):
            _, n_kv_heads, _, n_blocks, _ = planes[0].shape
            head_dim = n_blocks * fmt.block_size
            if rotation and head_dim % rotation:
                raise BoundsError(f"{rotation} channels of {head_dim} are rotated")
            bytes_per_thread = 4 * head_dim + fmt.row_bytes(head_dim) + 64
            scratch = chain.take(threads * bytes_per_thread)
            job = StoreJob(
                next_head=0,
                n_kv_heads=n_kv_heads,
                head_dim=head_dim,
                rotation=rotation if rotate else 0,
                x=Memory(x, 4 * n_tokens * n_kv_heads * head_dim),
                n_rows=f"rows{i}",
                # how many there are differs from batch to batch
                tokens=Memory(f"tokens{i}", 0),
                slots=Memory(f"slots{i}", 0),
                scratch=Memory(scratch, scratch.n_bytes),
                scratch_bytes=bytes_per_thread,
                codebook=0 if codebook is None else Memory(codebook, codebook.nbytes),
                n_planes=len(planes),
            )
            items = (*job, *itertools.chain(*plane_jobs(fmt, side, planes)))
            chain.add(_store_worker(fmt), items, min(threads, n_kv_heads))
    for i, segment in enumerate(cache.segments):
        if packs_groups(segment) and chain.bound.get(f"n_groups{i}") != 0:
            add_groups(chain, segment, cache.segments[-1], f"groups{i}", n_tokens)


def stored_rows(
    cache: LayerCache, batches: tuple[SegmentBatch, ...], n_tokens: int
) -> dict[str, int | NDArray[Any]]:
    """What `Chain.run` has to know of a batch's rows."""
    values = dict[str, int | NDArray[Any]]()
    for i, (segment, batch) in enumerate(zip(cache.segments, batches, strict=True)):
        if segment.is_whole:
            continue
        if packs_groups(segment):
            values |= new_groups(segment, cache.segments[-1], batch.groups, f"groups{i}")
            continue
        check_slots(batch, n_tokens, len(segment.k[0]))
        values[f"rows{i}"] = len(batch.slots)
        values[f"tokens{i}"] = batch.tokens
        values[f"slots{i}"] = batch.slots
    return values


def store_kv_cpu(
    k: Floats, v: Floats, cache: LayerCache, batches: tuple[SegmentBatch, ...]
) -> None:
    """Store a batch's rows: k, v [tokens, n_kv_heads, head_dim], each in its segment's types."""
    k, v = (np.ascontiguousarray(x, np.float32) for x in (k, v))
    chain = Chain(Scratch())
    add_store(chain, k, v, k.shape[0], cache, rotate=False)
    chain.run(**stored_rows(cache, batches, k.shape[0]))
