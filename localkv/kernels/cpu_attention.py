"""The CPU's attention: plans the work of a batch and lets compiled workers do it.

Sequences with few new rows take the decode kernels, which read packed K and V straight into
registers; the others take the prefill kernels, which decode a tile at a time for many rows.
"""

from __future__ import annotations

import struct
import threading
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localkv.cache_layout import pages_for
from localkv.kernels import cpu_attention_job as job_items
from localkv.kernels.cpu_attention_sizes import (
    BLOCK_ROWS,
    FEW_ROWS,
    PIECES_PER_THREAD,
    block_scratch_floats,
    partial_floats,
    row_scratch_floats,
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
from localkv.quant_formats.base import QuantFormat

Int64s = NDArray[np.int64]

FEW_PRODUCTS = 1 << 19
"""Products of Q and K that one thread makes before a second one would have come to help."""
MANY_PLANS, MANY_SEGMENTS = 8, 1024
"""So many are remembered."""


class Table:
    """An array of int64 and its address, which NumPy takes a microsecond to tell."""

    def __init__(self, items: Int64s) -> None:
        self.items = np.ascontiguousarray(items)
        self.address = int(self.items.ctypes.data)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Plan:
    """The pieces of work of a batch in one segment, the same for all layers.

    Attributes:
        batch: the batch's share of the segment, for which this is.
        group: query heads of a KV head, which the split into pieces depends on.
        visible: int64 [tokens], the rows of the segment that each token sees.
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


def _table(rows: Sequence[Sequence[int]], n_columns: int) -> Table:
    return Table(np.array(rows, dtype=np.int64).reshape(-1, n_columns))


def make_plan(seg_batch: SegmentBatch, batch: Batch, group: int, n_kv_heads: int) -> Plan:
    """Cut a batch into pieces, enough of them for all threads to be busy to the end."""
    positions = batch.positions.numpy()
    visible = positions + 1 - seg_batch.first_position
    table, width = seg_batch.page_table.data_ptr(), seg_batch.page_table.shape[1] * 8
    few, blocks = list[tuple[int, int, int, int]](), list[tuple[int, int, int, int]]()
    complete = True
    for i, length in enumerate(seg_batch.lengths):
        first, n_new = batch.starts[i], batch.starts[i + 1] - batch.starts[i]
        visible[first : first + n_new].clip(0, length, out=visible[first : first + n_new])
        pages = table + i * width
        if length == 0:
            complete = False
        elif n_new == 1 or n_new * group <= FEW_ROWS:
            few.append((first, n_new, pages, length))
        else:
            step = max(1, BLOCK_ROWS // group)
            # the last blocks see most, so they come first
            for at in reversed(range(0, n_new, step)):
                blocks.append((first + at, min(step, n_new - at), pages, length))
    n_pages = sum(pages_for(length) for *_, length in few)
    chunk_pages = max(1, n_pages * n_kv_heads // (PIECES_PER_THREAD * n_threads()))
    sequences, chunks = list[tuple[int, ...]](), list[tuple[int, int, int]]()
    for i, (first, n_new, pages, length) in enumerate(few):
        starts = range(0, pages_for(length), chunk_pages)
        sequences.append((first, n_new, pages, length, len(chunks), len(starts)))
        chunks += [(i, at, min(chunk_pages, pages_for(length) - at)) for at in starts]
    return Plan(
        batch=seg_batch,
        group=group,
        visible=Table(visible),
        sequences=_table(sequences, job_items.SEQ_COLUMNS),
        chunks=_table(chunks, job_items.CHUNK_COLUMNS),
        blocks=_table(blocks, job_items.BLOCK_COLUMNS),
        n_rows=max((n_new * group for _, n_new, _, _ in few), default=0),
        few_tokens=sum(length for *_, length in few),
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


def plane_table(fmt: QuantFormat, planes: tuple[Tensor, ...]) -> Table:
    """int64 [5, 2]: address and bytes of a region of up to four planes; the codes' plane again."""
    rows = [(plane.data_ptr(), plane.stride(1)) for plane in planes]
    codes = rows[len(fmt.planes) - 1]
    return _table([*rows, *[(0, 0)] * (4 - len(rows)), codes], 2)


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
        weakref.ref(segment),
        plane_table(segment.format_k, segment.k),
        plane_table(segment.format_v, segment.v),
        *blocks,
    )


class PackedAttention:
    """`SegmentAttention` by compiled kernels, on float32 queries and pages in the CPU's order."""

    def __init__(self) -> None:
        self.scratch = ScratchMemory()
        self.plans: dict[int, Plan] = {}
        self.tables: dict[int, SegmentTables] = {}

    def plan(self, seg_batch: SegmentBatch, batch: Batch, group: int, n_kv_heads: int) -> Plan:
        """The plan of a batch, which is made for its first layer."""
        plan = self.plans.get(id(seg_batch))
        if plan is None or plan.batch is not seg_batch or plan.group != group:
            if len(self.plans) >= MANY_PLANS:
                self.plans.clear()
            plan = make_plan(seg_batch, batch, group, n_kv_heads)
            self.plans[id(seg_batch)] = plan
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
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """See `SegmentAttention` for shapes."""
        q = q.contiguous()
        _, n_heads, head_dim = q.shape
        n_kv_heads = segment.k[0].shape[1]
        plan = self.plan(seg_batch, batch, n_heads // n_kv_heads, n_kv_heads)
        tables = self.segment_tables(segment, head_dim)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        if not plan.complete:
            out.zero_()
            lse.fill_(-torch.inf)
        job = [0] * job_items.JOB_ITEMS
        job[job_items.SCALE] = struct.unpack("<i", struct.pack("<f", softmax_scale))[0]
        job[job_items.N_KV_HEADS] = n_kv_heads
        job[job_items.GROUP] = plan.group
        job[job_items.HEAD_DIM] = head_dim
        job[job_items.K_BLOCK] = tables.k_block
        job[job_items.V_BLOCK] = tables.v_block
        job[job_items.Q] = q.data_ptr()
        job[job_items.OUT] = out.data_ptr()
        job[job_items.LSE] = lse.data_ptr()
        job[job_items.VISIBLE] = plan.visible.address
        job[job_items.K_PLANES] = tables.k_planes.address
        job[job_items.V_PLANES] = tables.v_planes.address
        if len(plan.chunks):
            self.run_rows(plan, segment, job)
        if len(plan.blocks):
            self.run_blocks(plan, segment, job)
        return out, lse

    def run_rows(self, plan: Plan, segment: Segment, job: list[int]) -> None:
        """The sequences with few new rows."""
        n_kv_heads, head_dim = job[job_items.N_KV_HEADS], job[job_items.HEAD_DIM]
        type_k, type_v = segment.format_k.name, segment.format_v.name
        tile = rows_per_tile(plan.n_rows)
        n_rows = -(-plan.n_rows // tile) * tile
        n_items = len(plan.chunks) * n_kv_heads
        few = plan.few_tokens * n_rows * n_kv_heads * head_dim < FEW_PRODUCTS
        threads = 1 if few else min(n_threads(), n_items)
        scratch = row_scratch_floats(n_rows, tile, head_dim)
        partial = partial_floats(n_items, n_rows, head_dim)
        memory = self.scratch.take(threads * scratch + partial)
        done = array("q", bytes(8 * len(plan.sequences) * n_kv_heads))
        job[job_items.NEXT] = 0
        job[job_items.N_ITEMS] = n_items
        job[job_items.SCRATCH_FLOATS] = scratch
        job[job_items.N_ROWS] = n_rows
        job[job_items.N_TILES] = n_rows // tile
        job[job_items.K_AFFINE] = cache_decoder(type_k).affine
        steps_k = 16 * head_dim // job[job_items.K_BLOCK]
        steps_v = 16 * head_dim // job[job_items.V_BLOCK]
        bytes_k = segment.k[len(segment.format_k.planes) - 1].stride(1)
        bytes_v = segment.v[len(segment.format_v.planes) - 1].stride(1)
        job[job_items.V_AHEAD] = -(-bytes_v // (64 * steps_k))
        job[job_items.K_AHEAD] = -(-bytes_k // (64 * steps_v))
        job[job_items.K_KERNEL] = score_kernel(type_k, tile)
        job[job_items.V_KERNEL] = weigh_kernel(type_v, tile)
        job[job_items.PIECES] = plan.chunks.address
        job[job_items.SEQUENCES] = plan.sequences.address
        job[job_items.SCRATCH] = memory
        job[job_items.PARTIAL] = memory + threads * scratch * 4
        job[job_items.DONE] = done.buffer_info()[0]
        run("cpu_attention_rows", job, threads)

    def run_blocks(self, plan: Plan, segment: Segment, job: list[int]) -> None:
        """The sequences with many new rows."""
        n_kv_heads, head_dim = job[job_items.N_KV_HEADS], job[job_items.HEAD_DIM]
        n_items = len(plan.blocks) * n_kv_heads
        threads = min(n_threads(), n_items)
        scratch = block_scratch_floats(head_dim)
        job[job_items.NEXT] = 0
        job[job_items.N_ITEMS] = n_items
        job[job_items.SCRATCH_FLOATS] = scratch
        job[job_items.K_KERNEL] = decode_k_kernel(segment.format_k.name)
        job[job_items.V_KERNEL] = decode_v_kernel(segment.format_v.name)
        job[job_items.PIECES] = plan.blocks.address
        job[job_items.SCRATCH] = self.scratch.take(threads * scratch)
        run("cpu_attention_blocks", job, threads)
