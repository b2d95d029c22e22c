"""Packing new rows of K and V, and complete groups of them, into pages in the CPU's order.

A group is packed from f16 pages of the tail. Where K's or V's type packs several tokens together,
both sides of a segment are packed so, and from the same rows of f16. What the pages hold then
doesn't depend on how a text was cut into batches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Arrays, LayerCache, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.cache.repack import copied, put_copies, repack_page, unpacked
from localkv.kernels.bounds import BoundsError, check_array, check_segment, check_slots
from localkv.kernels.cpu.arrays import Floats, address, all_bytes
from localkv.kernels.cpu.attention.kernels import run
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.runtime.chain import Chain, Memory, Scratch, Where
from localkv.kernels.cpu.store.jobs import GroupJob, PlaneJob, RotateJob, StoreJob
from localkv.quant_formats.base import QuantFormat
from localkv.quant_formats.shared.channel_groups import TOKENS
from localkv.system.threads import n_threads


def _plane_job(plane: NDArray[np.uint8] | Any, order: tuple[int, int, int]) -> PlaneJob:
    pages = all_bytes(plane)
    row_bytes = plane.shape[3] * plane.shape[4]
    return PlaneJob(0, Memory(pages, pages.nbytes), row_bytes, plane.strides[0], *order)


@functools.cache
def orders(fmt: QuantFormat, side: str) -> tuple[tuple[int, int, int], ...]:
    """The bits of an item, rows and columns of each plane on the side "k" or "v"
    (`shared/cpu/page_order.py`)."""
    found = [getattr(order, side) for order in fmt.cpu_layout.PLANES]
    return tuple(
        (order.item_bits, order.rows, order.columns(plane.n_bytes))
        for order, plane in zip(found, fmt.all_planes, strict=True)
    )


def plane_jobs(
    fmt: QuantFormat, side: str, planes: Sequence[NDArray[np.uint8] | Any]
) -> list[PlaneJob]:
    """The planes' jobs for rows that are encoded on the way."""
    return [
        _plane_job(plane, order) for plane, order in zip(planes, orders(fmt, side), strict=True)
    ]


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


MANY_GROUP_ROWS = 4 * TOKENS
"""From this number on, a second thread is worth its start."""


def packs_groups(segment: Segment) -> bool:
    """Whether rows of a segment are packed in groups, and not as they come."""
    return not segment.is_whole and group_tokens(segment) > 1


def group_tokens(segment: Segment) -> int:
    """Tokens of K and of V that are packed together."""
    return max(segment.format_k.group_tokens, segment.format_v.group_tokens)


def group_source(fmt: QuantFormat, side: str) -> KernelSource:
    """The kernel that packs groups of rows in a type."""
    return KernelSource("store/store_groups", {"FORMAT": fmt.codec_name, "OF_V": side == "v"})


def add_groups(
    chain: Chain, packed: Segment, tail: Segment, name: str, n_rows: int = MANY_GROUP_ROWS
) -> None:
    """Pack groups of rows of a tail.

    When the chain runs, it is given `new_groups`.

    Args:
        name: of the groups, and with `n_` before it of their number.
        n_rows: about how many rows there are.
    """
    check_tail(packed, tail)
    of_k = packed.format_k, packed.k, tail.k, packed.rotation_k, packed.scale_k
    of_v = packed.format_v, packed.v, tail.v, packed.rotation_v, packed.scale_v
    group = group_tokens(packed)
    for side, fmt, planes, rows, rotation, scales, codebook in (
        ("k", *of_k, packed.codebook_k),
        ("v", *of_v, packed.codebook_v),
    ):
        _, n_kv_heads, _, n_blocks, _ = planes[0].shape
        head_dim = n_blocks * fmt.block_size
        if rotation and head_dim % rotation:
            raise BoundsError(f"{rotation} channels of {head_dim} are rotated")
        if scales is not None:
            check_array("scales of heads", scales, "float32", n_kv_heads)
        tokens = fmt.group_tokens if fmt.group_tokens > 1 else TOKENS
        bytes_per_thread = tokens * (5 * head_dim + fmt.row_bytes(head_dim)) + 64
        threads = min(n_threads(), n_kv_heads) if n_rows >= MANY_GROUP_ROWS else 1
        scratch = chain.take(threads * bytes_per_thread)
        job = GroupJob(
            next_head=0,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            rotation=rotation,
            scales=0 if scales is None else Memory(scales, 4 * n_kv_heads),
            n_groups=f"n_{name}",
            # how many there are differs from batch to batch
            groups=Memory(name, 0),
            n_parts=group // tokens,
            tail=Memory(rows[0], rows[0].nbytes),
            scratch=Memory(scratch, scratch.n_bytes),
            scratch_bytes=bytes_per_thread,
            codebook=0 if codebook is None else Memory(codebook, codebook.nbytes),
            n_planes=len(planes),
        )
        items = (*job, *itertools.chain(*plane_jobs(fmt, side, planes)))
        chain.add(specialized(group_source(fmt, side))["worker"], items, threads)


def check_tail(packed: Segment, tail: Segment) -> None:
    """Both have the planes of their types, and the tail's rows are f16 as they came.

    Raises:
        BoundsError: they have not.
    """
    types = tail.format_k.name, tail.format_v.name
    if types != ("f16", "f16") or tail.rotation_k or tail.rotation_v:
        raise BoundsError(f"groups are packed from rows of {' and '.join(types)}")
    key_dim, value_dim = tail.k[0].shape[3], tail.v[0].shape[3]
    for segment in (packed, tail):
        check_segment(segment, key_dim, value_dim)
    if packed.k[0].shape[1] != tail.k[0].shape[1]:
        raise BoundsError("tails have other KV heads")


def new_groups(
    packed: Segment, tail: Segment, groups: NDArray[Any] | None, name: str
) -> dict[str, int | NDArray[Any]]:
    """What `Chain.run` has to know of a batch's groups.

    Raises:
        BoundsError: a group isn't of these pages.
    """
    groups = np.zeros((0, 2), np.int64) if groups is None else groups
    check_groups(groups, group_tokens(packed), len(packed.k[0]), len(tail.k[0]))
    return {f"n_{name}": len(groups), name: groups}


def check_groups(groups: NDArray[Any], n_tokens: int, n_pages: int, n_tail_pages: int) -> None:
    """Groups of `n_tokens` begin at whole groups of pages that there are; negative slots are none.

    Raises:
        BoundsError: they do not.
    """
    check_array("groups", groups, "int64", len(groups), 2)
    for slot, source in groups.tolist():
        if slot < 0:
            continue
        inside = slot < n_pages * PAGE_TOKENS and 0 <= source < n_tail_pages * PAGE_TOKENS
        if not inside or slot % n_tokens or source % n_tokens:
            raise BoundsError(
                f"a group at {slot} from {source}, of {n_pages}, {n_tail_pages} pages"
            )


def store_groups_cpu(packed: Segment, tail: Segment, groups: NDArray[Any]) -> None:
    """Pack the groups that a batch completes, once its rows are in the tail.

    Args:
        groups: int64 [n, 2], the slot of a group's first row, and that in the tail.
    """
    if not len(groups):
        return
    chain = Chain(Scratch())
    add_groups(chain, packed, tail, "groups", len(groups) * group_tokens(packed))
    chain.run(**new_groups(packed, tail, groups, "groups"))


MANY_VALUES = 1 << 16
"""From this number on, a second thread is worth its start."""


def rotate_cpu(x: Floats, block: int) -> Floats:
    """What `hadamard_transform` gives, bit for bit, for float32."""
    if block == 0:
        return x
    if block & (block - 1) or x.shape[-1] % block:
        raise ValueError(f"a Hadamard transform of {block} does not fit {x.shape[-1]} channels")
    if x.dtype != np.float32:
        raise BoundsError(f"a Hadamard transform of {x.dtype}")
    x = np.ascontiguousarray(x)
    out = np.empty_like(x)
    job = RotateJob(0, x.size // block, block, address(x), address(out))
    items = cast("Sequence[int]", job)  # no names among them
    run("store/rotate_rows", items, n_threads() if x.size >= MANY_VALUES else 1)
    return out


def repack_page_cpu(arrays: Arrays, source: Segment, target: Segment, page: int) -> None:
    """What `cache/repack.py` does, bit for bit."""
    if target.is_whole:
        repack_page(arrays, source, target, page)
        return
    sides, copies = list[Floats](), copied(arrays, source, target, page)
    for side in ("k", "v"):
        x = unpacked(arrays, source, side, page)[0].swapaxes(0, 1)
        before, after = (getattr(one, f"rotation_{side}") for one in (source, target))
        if before != after:
            x = rotate_cpu(rotate_cpu(x, before), after)
        sides.append(np.ascontiguousarray(x))
    tokens = np.arange(PAGE_TOKENS)
    rows = SegmentBatch(
        page_table=np.array([[page]]),
        lengths=(PAGE_TOKENS,),
        length_table=np.array([PAGE_TOKENS], np.int32),
        first_position=0,
        tokens=tokens,
        slots=page * PAGE_TOKENS + tokens,
    )
    store_kv_cpu(sides[0], sides[1], LayerCache((target,)), (rows,))
    put_copies(target, copies, page)
