"""The CPU's attention over latents: plans the work of a batch and lets a compiled worker do it."""

from __future__ import annotations

import functools
import weakref
from array import array
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Batch, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS, pages_for
from localkv.kernels.bounds import BoundsError, check_segment
from localkv.kernels.cpu.arrays import Floats, address
from localkv.kernels.cpu.attention.jobs import (
    LATENT_BLOCK_ITEMS,
    LATENT_ROWS,
    PIECE_ITEMS,
    TILE_ROWS,
    LatentBlock,
    LatentJob,
    LatentPiece,
    heads_at_once,
    latent_part_pages,
    latent_scratch,
    most_latent_parts,
    padded_rows,
    part_floats,
    rows_of_tile,
)
from localkv.kernels.cpu.attention.kernels import cache_decoder, decode_k_kernel, decode_v_kernel
from localkv.kernels.cpu.attention.packed_attention import (
    MANY_PLANS,
    MANY_SEGMENTS,
    ScratchMemory,
    float_bits,
    plane_table,
)
from localkv.kernels.cpu.attention.plan import (
    Int64s,
    Launch,
    Table,
    check_batch,
    table_of,
    visible_rows,
)
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.runtime.thread_pool import run_worker
from localkv.simd import LANES
from localkv.system.threads import n_threads


@dataclass(frozen=True)
class LatentLaunch:
    """Work of one call: tables of the kernel, and results of parts that have to be kept."""

    blocks: Table
    pieces: Table
    n_parts: int


@dataclass(frozen=True)
class LatentPlan:
    """The pieces of work of a batch in one segment, the same for all layers.

    Attributes:
        batch: the batch's share of the segment, for which this is.
        generated: of each sequence, what kind its tokens are of.
        n_heads, n_pages: of queries, and of the segment's cache.
        visible: int64 [tokens, 2], the first row of the segment that each token sees, and the end.
        launches: several where results of parts would take too much memory at once.
        complete: every token is part of a piece.
        calls: what was prepared of launches, by all that layers may differ in.
    """

    batch: SegmentBatch
    generated: tuple[bool, ...]
    n_heads: int
    n_pages: int
    visible: Table
    launches: tuple[LatentLaunch, ...]
    complete: bool
    calls: dict[tuple[object, ...], tuple[Launch, ...]] = field(default_factory=dict)


@dataclass
class _Launch:
    """Blocks and pieces, with no more parts than a launch has memory for."""

    blocks: list[LatentBlock] = field(default_factory=list)
    pieces: list[LatentPiece] = field(default_factory=list)
    n_parts: int = 0

    def add(
        self, token: int, head: int, n_rows: int, table: int, cuts: list[tuple[int, int]]
    ) -> None:
        for part, (at, stop) in enumerate(cuts):
            self.pieces.append(LatentPiece(len(self.blocks), part, at, stop))
        self.blocks.append(LatentBlock(token, head, n_rows, table, self.n_parts, len(cuts)))
        self.n_parts += len(cuts) if len(cuts) > 1 else 0

    def tables(self, n_tokens: int, n_heads: int) -> LatentLaunch:
        sizes = {"n_tokens": n_tokens, "n_heads": n_heads, "n_parts": self.n_parts}
        check_blocks(self.blocks, self.pieces, **sizes)
        blocks, pieces = (
            table_of(self.blocks, LATENT_BLOCK_ITEMS),
            table_of(self.pieces, PIECE_ITEMS),
        )
        return LatentLaunch(blocks, pieces, self.n_parts)


def make_latent_plan(
    seg_batch: SegmentBatch, batch: Batch, params: AttentionParams, n_heads: int, n_pages: int
) -> LatentPlan:
    """Cut a batch into blocks of rows, and what generated tokens see into parts.

    Where a token's context is cut depends on its kind and on what it sees, and on nothing else.

    Raises:
        BoundsError: the batch is not of a cache of `n_pages`.
    """
    check_batch(seg_batch, batch, n_pages)
    visible = visible_rows(seg_batch, batch, params)
    table, width = address(seg_batch.page_table), seg_batch.page_table.shape[1] * 8
    launches, n_covered = [_Launch()], 0
    for i in range(len(seg_batch.lengths)):
        tokens = range(batch.starts[i], batch.starts[i + 1])
        for run, step in _runs(visible, tokens, generated=batch.generated[i]):
            cuts = _cuts(int(visible[run[0], 0]), int(visible[run[-1], 1]), step)
            n_covered += len(run)
            for block in _row_blocks(run, n_heads):
                if launches[-1].n_parts + len(cuts) > most_latent_parts(n_heads):
                    launches.append(_Launch())
                launches[-1].add(*block, table + i * width, cuts)
    return LatentPlan(
        batch=seg_batch,
        generated=batch.generated,
        n_heads=n_heads,
        n_pages=n_pages,
        visible=Table(visible),
        launches=tuple(
            launch.tables(len(visible), n_heads) for launch in launches if launch.blocks
        ),
        complete=n_covered == len(visible),
    )


def _runs(visible: Int64s, tokens: range, *, generated: bool) -> list[tuple[range, int]]:
    """Tokens of a sequence that are cut alike, and the rows of a part, 0 for one part.

    Those that see nothing are left out. The last ones see most, so they come first.
    """
    steps = []
    for first, end in visible[tokens.start : tokens.stop].tolist():
        seen = pages_for(end) - first // PAGE_TOKENS if first < end else 0
        steps.append(
            latent_part_pages(seen) * PAGE_TOKENS if generated and seen else -1 * (not seen)
        )
    runs, start = [], tokens.start
    for step, same in groupby(steps):
        end = start + len(list(same))
        if step >= 0:
            runs.append((range(start, end), step))
        start = end
    return runs[::-1]


def _cuts(first: int, end: int, step: int) -> list[tuple[int, int]]:
    """Parts of rows `first` to `end`, which begin at multiples of `step`; one for 0."""
    if not step:
        return [(first, end)]
    starts = [max(first, at) for at in range(first // step * step, end, step)]
    return list(zip(starts, [*starts[1:], end], strict=True))


def _row_blocks(tokens: range, n_heads: int) -> list[tuple[int, int, int]]:
    """(token, head, rows): as many tokens as fit, or equal parts of the heads of one."""
    heads, step = heads_at_once(n_heads), max(1, LATENT_ROWS // n_heads)
    blocks = []
    for token in reversed(range(tokens.start, tokens.stop, step)):
        n_rows = min(step, tokens.stop - token) * n_heads
        if step > 1 or heads == n_heads:
            blocks.append((token, 0, n_rows))
        else:
            for head in range(0, n_heads, heads):
                blocks.append((token, head, min(heads, n_heads - head)))
    return blocks


def check_blocks(
    blocks: list[LatentBlock],
    pieces: list[LatentPiece],
    *,
    n_tokens: int,
    n_heads: int,
    n_parts: int,
) -> None:
    """Pieces are of tokens that there are, and their results have room.

    Raises:
        BoundsError: they aren't.
    """
    rows = np.array([block[:3] for block in blocks], dtype=np.int64).reshape(-1, 3)
    first = rows[:, 0] * n_heads + rows[:, 1]
    last = first + rows[:, 2]
    if len(rows) and (
        rows.min() < 0
        or rows[:, 2].min() < 1
        or rows[:, 2].max() > LATENT_ROWS
        or last.max() > n_tokens * n_heads
    ):
        raise BoundsError(f"blocks of up to {rows[:, 2].max()} rows of {n_tokens} tokens")
    for block in blocks:
        if block.n_parts < 1 or (block.n_parts > 1 and block.first_part + block.n_parts > n_parts):
            raise BoundsError(f"{block.n_parts} parts from {block.first_part} on, of {n_parts}")
    for piece in pieces:
        if not (
            0 <= piece.block < len(blocks)
            and 0 <= piece.part < blocks[piece.block].n_parts
            and 0 <= piece.first < piece.end
        ):
            raise BoundsError(f"part {piece.part} of block {piece.block}, of {len(blocks)}")


Q, Q_ROTATED, OUT, LSE, LATENT_PLANES, ROPE_PLANES, SCRATCH, PARTIAL, DONE = (
    LatentJob._fields.index(name)
    for name in (
        *("q", "q_rotated", "out", "lse", "latent_planes", "rope_planes"),
        *("scratch", "partial", "done"),
    )
)


def latents_source(n_heads: int) -> KernelSource:
    """The worker for queries of `n_heads` heads."""
    rows = rows_of_tile(n_heads, TILE_ROWS)
    return KernelSource("attention/latents", {"TILE_ROWS": rows})


@functools.cache
def latents_worker(n_heads: int) -> int:
    """The address of the worker for queries of `n_heads` heads."""
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
