"""The CPU's attention: plans the work of a batch and lets compiled workers do it.

Generated tokens take the decode kernels, which read packed K and V straight into registers. Tokens
of a prompt take the prefill kernels, which decode a tile at a time for many rows. The two round
differently. What a token gets depends on its kind and on what it sees, not on its batch.
"""

from __future__ import annotations

import struct
import threading
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Batch, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.bounds import BoundsError, check_segment
from localkv.kernels.cpu.arrays import Floats, address
from localkv.kernels.cpu.attention.jobs import PLANE, TILE_ROWS, Job
from localkv.kernels.cpu.attention.kernels import (
    cache_decoder,
    decode_k_kernel,
    decode_v_kernel,
    run,
    runs_in_blocks,
    score_kernel,
    tile_of,
    tiles_add_alike,
    weigh_kernel,
    whole_tiles,
)
from localkv.kernels.cpu.attention.plan import (
    Decode,
    Launch,
    Plan,
    RunBlocks,
    Table,
    make_plan,
    table_of,
)
from localkv.kernels.cpu.attention.sizes import (
    CHUNK,
    MOST_CHANNELS,
    block_scratch,
    part_result,
    row_scratch,
    run_block_scratch,
)
from localkv.quant_formats.base import QuantFormat
from localkv.simd import LANES
from localkv.system.threads import n_threads

LINE = 64
"""Bytes of a cache line."""
Bytes = NDArray[np.uint8]


def code_bytes(fmt: QuantFormat, planes: tuple[Bytes, ...]) -> int:
    """Bytes of codes of a page and KV head."""
    return planes[len(fmt.planes) - 1].strides[1]


class Fetches(NamedTuple):
    """Numbers of lines of a `Job`."""

    k_ahead: int
    v_ahead: int
    k_early: int
    v_early: int


def plan_fetches(segment: Segment, head_dim: int) -> Fetches:
    """Plan fetches that keep the memory busy alike during both sides' kernels; kernels of digits
    take some two thirds of the time that floats take."""
    decoders = [cache_decoder(fmt.name) for fmt in (segment.format_k, segment.format_v)]
    steps_k, steps_v = (PAGE_TOKENS // LANES * head_dim // decoder.block for decoder in decoders)
    lines_k, lines_v = (
        -(-code_bytes(fmt, planes) // LINE)
        for fmt, planes in ((segment.format_k, segment.k), (segment.format_v, segment.v))
    )
    time_k, time_v = (2 if decoder.digits else 3 for decoder in decoders)
    # of the lines, how many more than V's are fetched in the time of K's kernel
    more = (lines_k + lines_v) * time_k // (time_k + time_v) - lines_v
    k_early, v_early = max(0, more) // steps_k, max(0, -more) // steps_v
    return Fetches(
        -(-(lines_k - k_early * steps_k) // steps_v),
        -(-(lines_v - v_early * steps_v) // steps_k),
        k_early,
        v_early,
    )


FEW_PRODUCTS = 1 << 19
"""Products of Q and K that one thread makes before a second one would have come to help."""

MANY_PLANS, MANY_SEGMENTS = 16, 1024
"""The most that are remembered of each."""
Q, OUT, LSE, K_PLANES, V_PLANES, SCRATCH, PARTIAL, DONE = (
    Job._fields.index(name)
    for name in ("q", "out", "lse", "k_planes", "v_planes", "scratch", "partial", "done")
)


class ScratchMemory(threading.local):
    """Memory that is used again by the next call; it grows as needed."""

    def __init__(self) -> None:
        self.floats = np.empty(0, np.float32)
        self.address = 0

    def take(self, n_floats: int) -> int:
        """The address of `n_floats` floats, at the start of a cache line."""
        if self.floats.size < n_floats + 16:
            self.floats = np.empty(n_floats + 16, np.float32)
            self.address = (self.floats.ctypes.data + 63) // 64 * 64
        return self.address


def plane_table(
    fmt: QuantFormat, planes: tuple[Bytes, ...], codebook: Floats | None = None
) -> Table:
    """int64 [6, 3]: address, bytes of a KV head and bytes from page to page of up to four planes.
    Then the codes' plane again, and the address of the codebook, if there is one."""
    rows = [(address(plane), plane.strides[1], plane.strides[0]) for plane in planes]
    codes = rows[len(fmt.planes) - 1]
    numbers = 0 if codebook is None else address(codebook)
    return table_of([*rows, *[(0, 0, 0)] * (4 - len(rows)), codes, (numbers, 0, 0)], PLANE)


@dataclass(frozen=True)
class SegmentTables:
    """What kernels need to know of one layer's segment, whatever the batch.

    Attributes:
        segment: for which this is; its cache may go before we do.
        n_pages, n_kv_heads, head_dim: its sizes.
        k_planes, v_planes: see `plane_table`.
        k_block, v_block: values per block of the decoders.
    """

    segment: weakref.ref[Segment]
    n_pages: int
    n_kv_heads: int
    head_dim: int
    k_planes: Table
    v_planes: Table
    k_block: int
    v_block: int


def make_tables(segment: Segment, head_dim: int) -> SegmentTables:
    check_segment(segment, head_dim, pages_apart=True)
    n_pages, n_kv_heads = segment.k[0].shape[:2]
    blocks = []
    for fmt in (segment.format_k, segment.format_v):
        decoder = cache_decoder(fmt.name)
        blocks.append(decoder.block)
        if decoder.by_channel and head_dim > MOST_CHANNELS:
            raise ValueError(f"{fmt.name} has at most {MOST_CHANNELS} channels, not {head_dim}")
        if head_dim % blocks[-1]:
            raise ValueError(
                f"head_dim {head_dim} is no multiple of {blocks[-1]}, as {fmt.name} needs here"
            )
    return SegmentTables(
        weakref.ref(segment),
        n_pages,
        n_kv_heads,
        head_dim,
        plane_table(segment.format_k, segment.k, segment.codebook_k),
        plane_table(segment.format_v, segment.v, segment.codebook_v),
        *blocks,
    )


def float_bits(x: float) -> int:
    """The bits of a float32, as a job carries them."""
    return int.from_bytes(struct.pack("<f", x), "little")


class FloatTable:
    """Float32 that a job reads, and their address."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = np.array(values, np.float32)
        self.address = address(self.values)


@cache
def slopes_of(params: AttentionParams, n_heads: int) -> FloatTable:
    return FloatTable(params.slopes(n_heads))


RAMP = FloatTable(range(PAGE_TOKENS))


def prepare(
    plan: Plan, tables: SegmentTables, segment: Segment, head_dim: int, params: AttentionParams
) -> tuple[Launch, ...]:
    """The calls of a plan for one layer and those that are like it."""
    job = Job(*[0] * len(Job._fields))._replace(
        softmax_scale=float_bits(params.softmax_scale),
        softcap=float_bits(params.softcap),
        n_kv_heads=segment.k[0].shape[1],
        group=plan.group,
        head_dim=head_dim,
        k_block=tables.k_block,
        v_block=tables.v_block,
        visible=plan.visible.address,
        slopes=slopes_of(params, plan.group * segment.k[0].shape[1]).address if params.alibi else 0,
        ramp=RAMP.address if params.alibi else 0,
        rows_apart=max(CHUNK, segment.format_k.group_tokens, segment.format_v.group_tokens),
    )
    launches = list[Launch]()
    for decode in plan.decodes:
        launches.append(prepare_rows(decode, segment, job))
    if plan.run_blocks is not None:
        launches.append(prepare_run_blocks(plan.run_blocks, segment, job))
    if len(plan.blocks):
        launches.append(prepare_blocks(plan, segment, job))
    return tuple(launches)


def prepare_rows(decode: Decode, segment: Segment, job: Job) -> Launch:
    """Generated tokens."""
    n_kv_heads, head_dim = job.n_kv_heads, job.head_dim
    type_k, type_v = segment.format_k.name, segment.format_v.name
    decoder, adds_alike = cache_decoder(type_k), tiles_add_alike(type_k, type_v)
    n_rows = whole_tiles(decode.n_rows, job.group)
    tile = tile_of(n_rows, job.group, adds_alike=adds_alike)
    n_pieces = len(decode.chunks) * n_kv_heads
    few = decode.n_tokens * n_rows * n_kv_heads * head_dim < FEW_PRODUCTS
    threads = 1 if few else min(n_threads(), n_pieces)
    scratch = row_scratch(n_rows, tile, head_dim).end
    fetches = plan_fetches(segment, head_dim)
    job = job._replace(
        n_pieces=n_pieces,
        scratch_floats=scratch,
        n_rows=n_rows,
        n_tiles=n_rows // tile,
        n_parts=decode.n_parts,
        k_affine=int(decoder.affine and not decoder.by_channel),
        k_digits=int(decoder.digits and not decoder.by_channel),
        k_offset=decoder.offset,
        k_outliers=int(decoder.outliers and decoder.digits),
        **fetches._asdict(),
        k_kernel=score_kernel(type_k, tile),
        v_kernel=weigh_kernel(type_v, tile),
        pieces=decode.chunks.address,
        sequences=decode.sequences.address,
    )
    return Launch(
        "attention/decode",
        array("q", job),
        threads,
        scratch_floats=threads * scratch,
        partial_floats=decode.n_parts * n_kv_heads * part_result(n_rows, head_dim).end,
        done_items=len(decode.sequences) * n_kv_heads,
    )


def prepare_run_blocks(runs: RunBlocks, segment: Segment, job: Job) -> Launch:
    """Many generated tokens of a sequence."""
    n_pieces = len(runs.chunks) * job.n_kv_heads
    threads = min(n_threads(), n_pieces)
    scratch = run_block_scratch(runs.n_rows, runs.n_parts, job.head_dim).end
    job = job._replace(
        n_pieces=n_pieces,
        scratch_floats=scratch,
        n_rows=runs.n_rows,
        n_parts=runs.n_parts,
        k_kernel=decode_k_kernel(segment.format_k.name),
        v_kernel=decode_v_kernel(segment.format_v.name),
        pieces=runs.chunks.address,
        sequences=runs.sequences.address,
    )
    return Launch("attention/many", array("q", job), threads, threads * scratch)


def prepare_blocks(plan: Plan, segment: Segment, job: Job) -> Launch:
    """Tokens of prompts."""
    n_pieces = len(plan.blocks) * job.n_kv_heads
    threads = min(n_threads(), n_pieces)
    scratch = block_scratch(TILE_ROWS, job.head_dim).end
    job = job._replace(
        n_pieces=n_pieces,
        scratch_floats=scratch,
        k_kernel=decode_k_kernel(segment.format_k.name),
        v_kernel=decode_v_kernel(segment.format_v.name),
        pieces=plan.blocks.address,
    )
    return Launch("attention/prefill", array("q", job), threads, threads * scratch)


class PackedAttention:
    """`SegmentAttention` by compiled kernels, on float32 queries and pages in the CPU's order."""

    def __init__(self) -> None:
        self.plans: dict[tuple[int, int, int, bool], Plan] = {}
        self.tables: dict[int, SegmentTables] = {}
        self.forget()

    def forget(self) -> None:
        """Drop all that is kept from call to call."""
        self.scratch = ScratchMemory()
        self.plans.clear()
        self.tables.clear()

    def plan(
        self,
        seg_batch: SegmentBatch,
        batch: Batch,
        params: AttentionParams,
        group: int,
        n_kv_heads: int,
        n_pages: int,
        *,
        in_blocks: bool,
    ) -> Plan:
        """The plan of a batch, which is made for its first layer that sees as far
        back, and has types of the same kind."""
        key = id(seg_batch), params.window, params.chunk, in_blocks
        plan = self.plans.get(key)
        sizes = group, n_kv_heads, n_pages
        if (
            plan is None
            or plan.batch is not seg_batch
            or plan.generated != batch.generated
            or plan.sizes != sizes
        ):
            if len(self.plans) >= MANY_PLANS:
                self.plans.clear()
            plan = make_plan(seg_batch, batch, params, *sizes, in_blocks=in_blocks)
            self.plans[key] = plan
        return plan

    def give_away(self, plan: Plan, params: AttentionParams) -> None:
        """Forget a plan, which becomes another batch's."""
        self.plans.pop((id(plan.batch), params.window, params.chunk, plan.in_blocks), None)

    def segment_tables(self, segment: Segment, head_dim: int) -> SegmentTables:
        """The tables of a segment, which are made when it is first read."""
        tables = self.tables.get(id(segment))
        if tables is None or tables.segment() is not segment or tables.head_dim != head_dim:
            if len(self.tables) >= MANY_SEGMENTS:
                self.tables.clear()
            tables = make_tables(segment, head_dim)
            self.tables[id(segment)] = tables
        return tables

    def prepared(
        self,
        shape: tuple[int, ...],
        segment: Segment,
        seg_batch: SegmentBatch,
        batch: Batch,
        params: AttentionParams,
    ) -> tuple[Plan, SegmentTables, tuple[Launch, ...]]:
        """The calls for queries of this shape, [tokens, n_heads, head_dim], in one layer."""
        n_tokens, n_heads, head_dim = shape
        tables = self.segment_tables(segment, head_dim)
        group = n_heads // tables.n_kv_heads
        types = segment.format_k.name, segment.format_v.name
        sizes = group, tables.n_kv_heads, tables.n_pages
        plan = self.plan(seg_batch, batch, params, *sizes, in_blocks=runs_in_blocks(*types))
        if n_tokens != len(plan.visible) or n_heads != group * tables.n_kv_heads:
            raise BoundsError(f"queries {list(shape)}, of {len(plan.visible)} tokens")
        key = *types, head_dim, params
        launches = plan.launches.get(key)
        if launches is None:
            launches = prepare(plan, tables, segment, head_dim, params)
            plan.launches[key] = launches
        return plan, tables, launches

    def __call__(
        self,
        q: Floats,
        segment: Segment,
        seg_batch: SegmentBatch,
        batch: Batch,
        params: AttentionParams,
    ) -> tuple[Floats, Floats]:
        """See `SegmentAttention` for shapes."""
        q = np.ascontiguousarray(q)
        plan, tables, launches = self.prepared(q.shape, segment, seg_batch, batch, params)
        if q.dtype != np.float32:
            raise BoundsError(f"{q.dtype} queries")
        out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
        if not plan.complete:
            out.fill(0.0)
            lse.fill(-np.inf)
        for launch in launches:
            memory = self.scratch.take(launch.scratch_floats + launch.partial_floats)
            done = array("q", bytes(8 * launch.done_items))
            job = launch.job[:]
            job[Q], job[OUT], job[LSE] = address(q), address(out), address(lse)
            job[K_PLANES], job[V_PLANES] = tables.k_planes.address, tables.v_planes.address
            job[SCRATCH], job[PARTIAL] = memory, memory + launch.scratch_floats * 4
            job[DONE] = done.buffer_info()[0]
            run(launch.template, job, launch.threads)
        return out, lse
