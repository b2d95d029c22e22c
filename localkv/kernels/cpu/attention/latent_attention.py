"""The CPU's attention over latents: plans the work of a batch and lets a compiled worker do it."""

from __future__ import annotations

import functools
import weakref
from array import array
from dataclasses import dataclass

import numpy as np

from localkv.arch.mixer_spec import AttentionParams
from localkv.cache.batch import Batch, SegmentBatch
from localkv.cache.layer_cache import Segment
from localkv.kernels.bounds import BoundsError, check_segment
from localkv.kernels.cpu.arrays import Floats, address
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
from localkv.kernels.cpu.attention.tables import Table
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.runtime.thread_pool import run_worker
from localkv.simd.lanes import LANES
from localkv.system.threads import n_threads


def latents_source(n_heads: int) -> KernelSource:
    """The worker for queries of so many heads."""
    rows = rows_of_tile(n_heads, TILE_ROWS)
    return KernelSource("attention/latents", {"TILE_ROWS": rows})


@functools.cache
def _worker(n_heads: int) -> int:
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
        plane_table(segment.format_k, segment.k),
        plane_table(segment.format_v, segment.v),
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
        n_tokens, n_heads, latent_dim = q.shape
        rope_dim = q_rotated.shape[-1]
        tables = self.segment_tables(segment, latent_dim, rope_dim)
        plan = self.plan(seg_batch, batch, params, n_heads, segment.k[0].shape[0])
        if (
            q.dtype != np.float32
            or q_rotated.dtype != np.float32
            or q_rotated.shape[:2] != q.shape[:2]
            or n_tokens != len(plan.visible)
            or segment.k[0].shape[1] != 1
            or params.window
            or params.chunk
        ):
            raise BoundsError(f"{q.dtype} queries {list(q.shape)}, of {len(plan.visible)} tokens")
        out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
        if not plan.complete:
            out.fill(0.0)
            lse.fill(-np.inf)
        for launch in plan.launches:
            self._run(launch, plan, q, q_rotated, out, lse, segment, tables, params)
        return out, lse

    def _run(
        self,
        launch: LatentLaunch,
        plan: LatentPlan,
        q: Floats,
        q_rotated: Floats,
        out: Floats,
        lse: Floats,
        segment: Segment,
        tables: LatentTables,
        params: AttentionParams,
    ) -> None:
        n_heads, latent_dim, rope_dim = *q.shape[1:], q_rotated.shape[-1]
        tile_rows = rows_of_tile(n_heads, TILE_ROWS)
        n_rows = padded_rows(n_heads, tile_rows)
        threads = min(n_threads(), len(launch.pieces))
        scratch = latent_scratch(n_rows, tile_rows, latent_dim, rope_dim).end
        kept = launch.n_parts * part_floats(n_rows, latent_dim)
        memory = self.scratch.take(threads * scratch + kept)
        done = array("q", bytes(8 * len(launch.blocks)))
        job = LatentJob(
            next_piece=0,
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
            q=address(q),
            q_rotated=address(q_rotated),
            out=address(out),
            lse=address(lse),
            visible=plan.visible.address,
            pieces=launch.pieces.address,
            blocks=launch.blocks.address,
            latent_planes=tables.latent_planes.address,
            rope_planes=tables.rope_planes.address,
            scratch=memory,
            scratch_floats=scratch,
            n_rows=n_rows,
            partial=memory + threads * scratch * 4,
            done=done.buffer_info()[0],
        )
        items = array("q", job)
        run_worker(_worker(n_heads), items.buffer_info()[0], threads)
