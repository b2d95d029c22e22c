"""The CPU's attention over latents: plans the work of a batch and lets a compiled worker do it."""

from __future__ import annotations

import functools
import weakref
from array import array
from dataclasses import dataclass

import numpy as np

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Batch, Segment, SegmentBatch
from localkv.kernels.bounds import BoundsError, check_segment
from localkv.kernels.cpu.addresses import Floats, address
from localkv.kernels.cpu.attention.job import TILE_ROWS
from localkv.kernels.cpu.attention.kernels import (
    cache_decoder,
    decode_k_kernel,
    decode_v_kernel,
)
from localkv.kernels.cpu.attention.latent_job import LatentJob
from localkv.kernels.cpu.attention.latent_plan import LatentLaunch, LatentPlan, make_latent_plan
from localkv.kernels.cpu.attention.latent_sizes import (
    latent_scratch,
    padded_rows,
    part_floats,
    rows_of_tile,
)
from localkv.kernels.cpu.attention.packed_attention import (
    MANY_PLANS,
    MANY_SEGMENTS,
    ScratchMemory,
    float_bits,
    plane_table,
)
from localkv.kernels.cpu.attention.plan import Launch
from localkv.kernels.cpu.attention.tables import Table
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.runtime.thread_pool import run_worker
from localkv.simd.lanes import LANES
from localkv.system.threads import n_threads

Q, Q_ROTATED, OUT, LSE, LATENT_PLANES, ROPE_PLANES, SCRATCH, PARTIAL, DONE = (
    LatentJob._fields.index(name)
    for name in (
        *("q", "q_rotated", "out", "lse", "latent_planes", "rope_planes"),
        *("scratch", "partial", "done"),
    )
)


def latents_source(n_heads: int) -> KernelSource:
    """The worker for queries of so many heads."""
    rows = rows_of_tile(n_heads, TILE_ROWS)
    return KernelSource("attention/latents", {"TILE_ROWS": rows})


@functools.cache
def latents_worker(n_heads: int) -> int:
    """The address of the worker for queries of so many heads."""
    return specialized(latents_source(n_heads))["worker"]


@dataclass(frozen=True)
class LatentTables:
    """What the kernel needs to know of one layer's segment, whatever the batch.

    Attributes:
        segment: for which this is; its cache may go before we do.
        latent_planes, rope_planes: see `plane_table`.
        latent_block, rope_block: values per block of the decoders.
    """

    segment: weakref.ref[Segment]
    latent_planes: Table
    rope_planes: Table
    latent_block: int
    rope_block: int


def make_tables(segment: Segment, latent_dim: int, rope_dim: int) -> LatentTables:
    check_segment(segment, latent_dim, rope_dim)
    blocks = []
    for fmt, dim in ((segment.format_k, latent_dim), (segment.format_v, rope_dim)):
        blocks.append(cache_decoder(fmt.name).block)
        if dim % blocks[-1] or dim % LANES:
            raise ValueError(f"{dim} channels are no whole blocks of {fmt.name}")
    return LatentTables(
        weakref.ref(segment),
        plane_table(segment.format_k, segment.k, segment.codebook_k),
        plane_table(segment.format_v, segment.v, segment.codebook_v),
        *blocks,
    )


class LatentAttention:
    """`SegmentLatents` by a compiled kernel, on float32 queries and pages in the CPU's order."""

    def __init__(self) -> None:
        self.plans: dict[int, LatentPlan] = {}
        self.tables: dict[int, LatentTables] = {}
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
        n_heads: int,
        n_pages: int,
    ) -> LatentPlan:
        """The plan of a batch, which is made for its first layer."""
        plan = self.plans.get(id(seg_batch))
        if (
            plan is None
            or plan.batch is not seg_batch
            or plan.generated != batch.generated
            or (plan.n_heads, plan.n_pages) != (n_heads, n_pages)
        ):
            if len(self.plans) >= MANY_PLANS:
                self.plans.clear()
            plan = make_latent_plan(seg_batch, batch, params, n_heads, n_pages)
            self.plans[id(seg_batch)] = plan
        return plan

    def segment_tables(self, segment: Segment, latent_dim: int, rope_dim: int) -> LatentTables:
        """The tables of a segment, which are made when it is first read."""
        tables = self.tables.get(id(segment))
        if tables is None or tables.segment() is not segment:
            if len(self.tables) >= MANY_SEGMENTS:
                self.tables.clear()
            tables = make_tables(segment, latent_dim, rope_dim)
            self.tables[id(segment)] = tables
        return tables

    def __call__(
        self,
        q: Floats,
        q_rotated: Floats,
        segment: Segment,
        seg_batch: SegmentBatch,
        batch: Batch,
        params: AttentionParams,
    ) -> tuple[Floats, Floats]:
        """See `SegmentLatents` for shapes."""
        q, q_rotated = np.ascontiguousarray(q), np.ascontiguousarray(q_rotated)
        rope_dim = q_rotated.shape[-1]
        if (
            q.dtype != np.float32
            or q_rotated.dtype != np.float32
            or q_rotated.shape[:2] != q.shape[:2]
        ):
            raise BoundsError(f"{q.dtype} queries {list(q.shape)}, {list(q_rotated.shape)}")
        plan, tables, launches = self.prepared(q.shape, rope_dim, segment, seg_batch, batch, params)
        out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
        if not plan.complete:
            out.fill(0.0)
            lse.fill(-np.inf)
        for launch in launches:
            memory = self.scratch.take(launch.scratch_floats + launch.partial_floats)
            done = array("q", bytes(8 * launch.done_items))
            job = launch.job[:]
            job[Q], job[Q_ROTATED] = address(q), address(q_rotated)
            job[OUT], job[LSE] = address(out), address(lse)
            job[LATENT_PLANES] = tables.latent_planes.address
            job[ROPE_PLANES] = tables.rope_planes.address
            job[SCRATCH], job[PARTIAL] = memory, memory + launch.scratch_floats * 4
            job[DONE] = done.buffer_info()[0]
            run_worker(latents_worker(q.shape[1]), job.buffer_info()[0], launch.threads)
        return out, lse

    def prepared(
        self,
        shape: tuple[int, ...],
        rope_dim: int,
        segment: Segment,
        seg_batch: SegmentBatch,
        batch: Batch,
        params: AttentionParams,
    ) -> tuple[LatentPlan, LatentTables, tuple[Launch, ...]]:
        """The calls for queries of this shape, [tokens, n_heads, latent_dim], in one layer."""
        n_tokens, n_heads, latent_dim = shape
        tables = self.segment_tables(segment, latent_dim, rope_dim)
        plan = self.plan(seg_batch, batch, params, n_heads, segment.k[0].shape[0])
        if (
            n_tokens != len(plan.visible)
            or segment.k[0].shape[1] != 1
            or params.window
            or params.chunk
        ):
            raise BoundsError(f"queries {list(shape)}, of {len(plan.visible)} tokens")
        key = segment.format_k.name, segment.format_v.name, latent_dim, rope_dim, params
        calls = plan.calls.get(key)
        if calls is None:
            calls = plan.calls[key] = tuple(
                prepare(one, plan, shape, rope_dim, segment, tables, params)
                for one in plan.launches
            )
        return plan, tables, calls


def prepare(
    launch: LatentLaunch,
    plan: LatentPlan,
    shape: tuple[int, ...],
    rope_dim: int,
    segment: Segment,
    tables: LatentTables,
    params: AttentionParams,
) -> Launch:
    """A call for one layer and those that are like it."""
    _, n_heads, latent_dim = shape
    tile_rows = rows_of_tile(n_heads, TILE_ROWS)
    n_rows = padded_rows(n_heads, tile_rows)
    threads = min(n_threads(), len(launch.pieces))
    scratch = latent_scratch(n_rows, tile_rows, latent_dim, rope_dim).end
    job = LatentJob(*[0] * len(LatentJob._fields))._replace(
        n_pieces=len(launch.pieces),
        n_heads=n_heads,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        softmax_scale=float_bits(params.softmax_scale),
        softcap=float_bits(params.softcap),
        latent_block=tables.latent_block,
        rope_block=tables.rope_block,
        latent_kernel=decode_k_kernel(segment.format_k.name),
        rope_kernel=decode_v_kernel(segment.format_v.name),
        visible=plan.visible.address,
        pieces=launch.pieces.address,
        blocks=launch.blocks.address,
        scratch_floats=scratch,
        n_rows=n_rows,
    )
    return Launch(
        "attention/latents",
        array("q", job),
        threads,
        scratch_floats=threads * scratch,
        partial_floats=launch.n_parts * part_floats(n_rows, latent_dim),
        done_items=len(launch.blocks),
    )
