"""Packing new rows of K and V into pages in the CPU's order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from localkv.cache.batch import SegmentBatch
from localkv.cache.layer_cache import LayerCache, Segment
from localkv.formats.base import QuantFormat
from localkv.formats.codebooks import codec_of
from localkv.kernels.bounds import BoundsError, check_segment, check_slots
from localkv.kernels.cpu.arrays import Floats, address
from localkv.kernels.cpu.attention.kernels import run
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.runtime.chain import Chain, Memory, Scratch, Where
from localkv.kernels.cpu.store.group_store import add_groups, new_groups, packs_groups
from localkv.kernels.cpu.store.job import PlaneJob, ScatterJob, StoreJob
from localkv.kernels.cpu.store.plane_jobs import orders, plane_jobs
from localkv.system.threads import n_threads

MANY_BYTES = 1 << 16
"""From this number on, a second thread is worth its start."""
MANY_ROWS = 16
"""The same for rows that are encoded, too."""


def store_source(fmt: QuantFormat) -> KernelSource | None:
    """The kernel that encodes a type's rows; None for types that NumPy encodes."""
    if fmt.row_planes:
        return None
    return KernelSource("store/store_rows", {"FORMAT": fmt.codec_name})


@functools.cache
def _store_worker(fmt: QuantFormat) -> int:
    source = store_source(fmt)
    assert source is not None
    return specialized(source)["worker"]


def has_encoders(cache: LayerCache) -> bool:
    """Whether rows of all the cache's types are encoded by compiled code."""
    return all(
        store_source(fmt) is not None
        for segment in cache.segments
        if not packs_groups(segment)
        for fmt in (segment.format_k, segment.format_v)
    )


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
        if packs_groups(segment) or chain.bound.get(f"rows{i}") == 0:
            continue
        check_segment(segment, *_widths(segment))
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
    if not has_encoders(cache):
        scatter_encoded(k, v, cache, batches)
        return
    k, v = (np.ascontiguousarray(x, np.float32) for x in (k, v))
    chain = Chain(Scratch())
    add_store(chain, k, v, k.shape[0], cache, rotate=False)
    chain.run(**stored_rows(cache, batches, k.shape[0]))


def scatter_encoded(
    k: Floats, v: Floats, cache: LayerCache, batches: tuple[SegmentBatch, ...]
) -> None:
    """The same for types without a compiled encoder: NumPy encodes, what it yields is moved."""
    for segment, batch in zip(cache.segments, batches, strict=True):
        n_tokens, n_kv_heads, key_dim = k.shape
        n_rows = len(batch.slots)
        if n_rows == 0:
            continue
        check_segment(segment, key_dim, v.shape[-1])
        check_slots(batch, n_tokens, len(segment.k[0]))
        if n_kv_heads != segment.k[0].shape[1]:
            raise BoundsError(f"rows of {n_kv_heads} KV heads for {segment.k[0].shape[1]}")
        rows_k, rows_v = (x if n_rows == len(x) else x[batch.tokens] for x in (k, v))
        kept = list[NDArray[Any]]()  # the job holds addresses only
        entries = list[PlaneJob]()
        for rows, fmt, planes, codebook, side in (
            (rows_k, segment.format_k, segment.k, segment.codebook_k, "k"),
            (rows_v, segment.format_v, segment.v, segment.codebook_v, "v"),
        ):
            encoded = codec_of(fmt, codebook).encode(rows)
            for values, plane, order in zip(encoded, planes, orders(fmt, side), strict=True):
                kept.append(np.ascontiguousarray(values))
                row_bytes = plane.shape[3] * plane.shape[4]
                entries.append(PlaneJob(address(kept[-1]), address(plane), row_bytes, *order))
        job = ScatterJob(0, n_kv_heads, n_rows, address(batch.slots), len(kept))
        many = sum(values.nbytes for values in kept) >= MANY_BYTES
        items = cast("Sequence[int]", (*job, *itertools.chain(*entries)))  # no names among them
        run("store/scatter", items, min(n_threads(), n_kv_heads) if many else 1)
