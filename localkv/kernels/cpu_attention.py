"""The CPU's attention: plans the work of a batch and lets compiled workers do it.

Sequences with few new rows take the decode kernels, which read packed K and V straight into
registers; the others take the prefill kernels, which decode a tile at a time for many rows.
"""

from __future__ import annotations

import struct
import threading
import weakref
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localkv.cache_layout import PAGE_TOKENS, pages_for
from localkv.config import AttentionParams
from localkv.kernels.cpu_attention_job import (
    BLOCK_ITEMS,
    BLOCK_ROWS,
    CHUNK_ITEMS,
    SEQUENCE_ITEMS,
    TILE,
    TILE_ROWS,
    Block,
    Chunk,
    Job,
    Sequence,
)
from localkv.kernels.cpu_kernels import (
    cache_decoder,
    decode_k_kernel,
    decode_v_kernel,
    n_threads,
    rows_per_tile,
    run,
    score_kernel,
    weigh_kernel,
)
from localkv.kv_cache import Batch, Segment, SegmentBatch
from localkv.simd.vector import LANES

Int64s = NDArray[np.int64]

FEW_ROWS = 16
"""Rows (new tokens * query heads of a KV head) up to which a sequence takes the decode kernels."""
PIECES_PER_THREAD = 16
FEW_PRODUCTS = 1 << 19
"""Products of Q and K that one thread makes before a second one would have come to help."""
MANY_PLANS, MANY_SEGMENTS = 16, 1024
"""So many are remembered."""
NOTHING = Job(*[0] * len(Job._fields))


class Table:
    """An array of int64 and its address, which NumPy takes a microsecond to tell."""

    def __init__(self, items: Int64s) -> None:
        self.items = np.ascontiguousarray(items)
        self.address = int(self.items.ctypes.data)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Plan:
    """The pieces of work of a batch in one segment, the same for all layers of one window.

    Attributes:
        batch: the batch's share of the segment, for which this is.
        group: query heads of a KV head, which the split into pieces depends on.
        visible: int64 [tokens, 2], the first row of the segment that each token sees, and the end.
        sequences, chunks: tables of the decode kernels (see `cpu_attention_job`).
        blocks: table of the prefill kernels.
        n_rows, few_tokens: rows of the decode kernels, and rows of K they read.
        complete: every token is part of a piece.
    """

    batch: SegmentBatch
    group: int
    visible: Table
    sequences: Table
    chunks: Table
    blocks: Table
    n_rows: int
    few_tokens: int
    complete: bool


def _table(rows: Seq[Seq[int]], n_columns: int) -> Table:
    return Table(np.array(rows, dtype=np.int64).reshape(-1, n_columns))


def visible_rows(seg_batch: SegmentBatch, batch: Batch, window: int) -> Int64s:
    """int64 [tokens, 2], the first row of the segment that each token sees, and the end."""
    end = batch.positions.numpy() + 1 - seg_batch.first_position
    first = end - window if window else np.zeros_like(end)
    lengths = np.repeat(seg_batch.lengths, np.diff(batch.starts))
    return np.stack((first, end), axis=1).clip(0, lengths[:, None])


def make_plan(
    seg_batch: SegmentBatch, batch: Batch, window: int, group: int, n_kv_heads: int
) -> Plan:
    """Cut a batch into pieces, enough of them for all threads to be busy to the end."""
    visible = visible_rows(seg_batch, batch, window)
    table, width = seg_batch.page_table.data_ptr(), seg_batch.page_table.shape[1] * 8
    few, blocks = list[tuple[int, int, int, int, range]](), list[Block]()
    complete = True
    for i, length in enumerate(seg_batch.lengths):
        first, n_new = batch.starts[i], batch.starts[i + 1] - batch.starts[i]
        pages = table + i * width
        begin, end = visible[first, 0], visible[first + n_new - 1, 1]
        if begin >= end:
            complete = False
        elif n_new == 1 or n_new * group <= FEW_ROWS:
            seen = range(int(begin) // PAGE_TOKENS, pages_for(int(end)))
            few.append((first, n_new, pages, length, seen))
        else:
            step = max(1, BLOCK_ROWS // group)
            # the last blocks see most, so they come first
            for at in reversed(range(0, n_new, step)):
                blocks.append(Block(first + at, min(step, n_new - at), pages))
    n_pages = sum(len(seen) for *_, seen in few)
    chunk_pages = max(1, n_pages * n_kv_heads // (PIECES_PER_THREAD * n_threads()))
    sequences, chunks = list[Sequence](), list[Chunk]()
    for i, (first, n_new, pages, length, seen) in enumerate(few):
        starts = seen[::chunk_pages]
        sequences.append(Sequence(first, n_new, pages, length, len(chunks), len(starts)))
        chunks += [Chunk(i, at, min(chunk_pages, seen.stop - at)) for at in starts]
    return Plan(
        batch=seg_batch,
        group=group,
        visible=Table(visible),
        sequences=_table(sequences, SEQUENCE_ITEMS),
        chunks=_table(chunks, CHUNK_ITEMS),
        blocks=_table(blocks, BLOCK_ITEMS),
        n_rows=max((n_new * group for _, n_new, *_ in few), default=0),
        few_tokens=n_pages * PAGE_TOKENS,
        complete=complete,
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


def plane_table(planes: tuple[Tensor, ...]) -> Table:
    """int64 [5, 2]: address and bytes of a region of up to four planes; the last plane again."""
    rows = [(plane.data_ptr(), plane.stride(1)) for plane in planes]
    return _table([*rows, *[(0, 0)] * (4 - len(rows)), rows[-1]], 2)


@dataclass(frozen=True)
class SegmentTables:
    """What kernels need to know of one layer's segment, whatever the batch.

    Attributes:
        segment: for which this is; its cache may go before we do.
        k_planes, v_planes: see `plane_table`.
        k_block, v_block: values per block of the decoders.
    """

    segment: weakref.ref[Segment]
    k_planes: Table
    v_planes: Table
    k_block: int
    v_block: int


def make_tables(segment: Segment, head_dim: int) -> SegmentTables:
    blocks = []
    for fmt in (segment.format_k, segment.format_v):
        blocks.append(cache_decoder(fmt.name).block)
        if head_dim % blocks[-1]:
            raise ValueError(
                f"head_dim {head_dim} is no multiple of {blocks[-1]}, as {fmt.name} needs here"
            )
    return SegmentTables(
        weakref.ref(segment), plane_table(segment.k), plane_table(segment.v), *blocks
    )


def float_bits(x: float) -> int:
    """The bits of a float32, as a job carries them."""
    return int.from_bytes(struct.pack("<f", x), "little")


class PackedAttention:
    """`SegmentAttention` by compiled kernels, on float32 queries and pages in the CPU's order."""

    def __init__(self) -> None:
        self.scratch = ScratchMemory()
        self.plans: dict[tuple[int, int], Plan] = {}
        self.tables: dict[int, SegmentTables] = {}

    def plan(
        self, seg_batch: SegmentBatch, batch: Batch, window: int, group: int, n_kv_heads: int
    ) -> Plan:
        """The plan of a batch, which is made for its first layer of that window."""
        key = id(seg_batch), window
        plan = self.plans.get(key)
        if plan is None or plan.batch is not seg_batch or plan.group != group:
            if len(self.plans) >= MANY_PLANS:
                self.plans.clear()
            plan = make_plan(seg_batch, batch, window, group, n_kv_heads)
            self.plans[key] = plan
        return plan

    def segment_tables(self, segment: Segment, head_dim: int) -> SegmentTables:
        """The tables of a segment, which are made when it is first read."""
        tables = self.tables.get(id(segment))
        if tables is None or tables.segment() is not segment:
            if len(self.tables) >= MANY_SEGMENTS:
                self.tables.clear()
            tables = make_tables(segment, head_dim)
            self.tables[id(segment)] = tables
        return tables

    def __call__(
        self,
        q: Tensor,
        segment: Segment,
        seg_batch: SegmentBatch,
        batch: Batch,
        params: AttentionParams,
    ) -> tuple[Tensor, Tensor]:
        """See `SegmentAttention` for shapes."""
        q = q.contiguous()
        _, n_heads, head_dim = q.shape
        n_kv_heads = segment.k[0].shape[1]
        plan = self.plan(seg_batch, batch, params.window, n_heads // n_kv_heads, n_kv_heads)
        tables = self.segment_tables(segment, head_dim)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        if not plan.complete:
            out.zero_()
            lse.fill_(-torch.inf)
        job = NOTHING._replace(
            softmax_scale=float_bits(params.softmax_scale),
            softcap=float_bits(params.softcap),
            n_kv_heads=n_kv_heads,
            group=plan.group,
            head_dim=head_dim,
            k_block=tables.k_block,
            v_block=tables.v_block,
            q=q.data_ptr(),
            out=out.data_ptr(),
            lse=lse.data_ptr(),
            visible=plan.visible.address,
            k_planes=tables.k_planes.address,
            v_planes=tables.v_planes.address,
        )
        if len(plan.chunks):
            self.run_rows(plan, segment, job)
        if len(plan.blocks):
            self.run_blocks(plan, segment, job)
        return out, lse

    def run_rows(self, plan: Plan, segment: Segment, job: Job) -> None:
        """The sequences with few new rows."""
        n_kv_heads, head_dim = job.n_kv_heads, job.head_dim
        type_k, type_v = segment.format_k.name, segment.format_v.name
        tile = rows_per_tile(plan.n_rows)
        n_rows = -(-plan.n_rows // tile) * tile
        n_pieces = len(plan.chunks) * n_kv_heads
        few = plan.few_tokens * n_rows * n_kv_heads * head_dim < FEW_PRODUCTS
        threads = 1 if few else min(n_threads(), n_pieces)
        # q, sums of its blocks, logits, sums of exponentials; scaled weights; a cache line more
        # against false sharing
        row_floats = head_dim + head_dim // LANES + PAGE_TOKENS + LANES
        scratch = n_rows * row_floats + tile * PAGE_TOKENS + 16
        partial = n_pieces * n_rows * (head_dim + 2)
        memory = self.scratch.take(threads * scratch + partial)
        done = array("q", bytes(8 * len(plan.sequences) * n_kv_heads))
        steps_k, steps_v = LANES * head_dim // job.k_block, LANES * head_dim // job.v_block
        job = job._replace(
            n_pieces=n_pieces,
            scratch_floats=scratch,
            n_rows=n_rows,
            n_tiles=n_rows // tile,
            k_affine=int(cache_decoder(type_k).affine),
            v_ahead=-(-segment.v[-1].stride(1) // (64 * steps_k)),
            k_ahead=-(-segment.k[-1].stride(1) // (64 * steps_v)),
            k_kernel=score_kernel(type_k, tile),
            v_kernel=weigh_kernel(type_v, tile),
            pieces=plan.chunks.address,
            sequences=plan.sequences.address,
            scratch=memory,
            partial=memory + threads * scratch * 4,
            done=done.buffer_info()[0],
        )
        run("cpu_attention_rows", job, threads)

    def run_blocks(self, plan: Plan, segment: Segment, job: Job) -> None:
        """The sequences with many new rows."""
        n_pieces = len(plan.blocks) * job.n_kv_heads
        threads = min(n_threads(), n_pieces)
        # q, out, tiles of K and V; logits; references, sums; scales; a cache line between threads
        scratch = 2 * (BLOCK_ROWS + TILE) * job.head_dim + TILE_ROWS * TILE
        scratch += BLOCK_ROWS * (1 + LANES) + 2 * LANES + 16
        job = job._replace(
            n_pieces=n_pieces,
            scratch_floats=scratch,
            k_kernel=decode_k_kernel(segment.format_k.name),
            v_kernel=decode_v_kernel(segment.format_v.name),
            pieces=plan.blocks.address,
            scratch=self.scratch.take(threads * scratch),
        )
        run("cpu_attention_blocks", job, threads)
