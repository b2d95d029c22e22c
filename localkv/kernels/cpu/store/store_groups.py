"""The worker that packs groups of tokens from rows of f16, compiled for each type and side.

Types with scales by channel are encoded for a group at once, others row by row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.store.jobs import GROUP_ITEMS, GroupJob
from localkv.kernels.cpu.store.pages import put_row, read_plane, region_of, rotate_block
from localkv.quant_formats import FORMATS
from localkv.quant_formats.shared.channel_groups import TOKENS as FEW_TOKENS
from localkv.quant_formats.shared.cpu.rounding import encode_channels
from localkv.simd import LANES
from localkv.simd.arithmetic import div
from localkv.simd.kinds import Address, Addresses, Count
from localkv.simd.memory import (
    broadcast_f32,
    get_f32,
    get_i32,
    get_i64,
    load_f16,
    load_f32,
    put_f32,
    put_i32,
    reader,
    store_f32,
    take_next,
)

read_group_job = reader(GroupJob)

FORMAT = FORMATS[parameter("FORMAT", "q8_0c")]
facts, codec = FORMAT.cpu_layout, FORMAT.part("cpu")
pack: Any = getattr(codec, "pack", None)
encode: Any = getattr(codec, "encode", None)
start_row: Any = getattr(codec, "start_row", None)
BY_CHANNEL = FORMAT.group_tokens > 1
TOKENS = FORMAT.group_tokens if BY_CHANNEL else FEW_TOKENS
"""Tokens that are packed at once."""
HAS_ROW_FIELDS = len(FORMAT.row_planes) > 0
OF_V = parameter("OF_V", False)
"""The side, whose rows of f16 lie in an order of their own."""
BLOCK, AFFINE = facts.BLOCK, facts.AFFINE
LAST = np.float32(facts.LAST if BY_CHANNEL else 0)
SCALE_ROWS = TOKENS if BY_CHANNEL else 1
"""Rows of a plane of scales that are packed at once."""


@njit
def load_rows(tail: Address, first: int, x: Address, head_dim: int, scratch: Address) -> None:
    """x float32 [TOKENS, head_dim] = the rows from token `first` on, of a region of f16."""
    for token in range(first, first + TOKENS, LANES):
        group, out = token // LANES * head_dim * LANES, x + 4 * (token - first) * head_dim
        for c in range(0, head_dim, LANES):
            for i in range(LANES):
                values = load_f16(tail, group + (c + i) * LANES)
                if OF_V:
                    store_f32(out, i * head_dim + c, values)
                    continue
                # lanes are tokens
                store_f32(scratch, 0, values)
                for lane in range(LANES):
                    put_f32(out, lane * head_dim + c + i, get_f32(scratch, lane))


@njit
def encode_token(x: Address, codes: Address, fields: Addresses, head_dim: int) -> None:
    """One row's fields; channels' scales are made before."""
    if HAS_ROW_FIELDS:
        of_row = start_row(x, fields, head_dim)
    for block in range(head_dim // BLOCK):
        if BY_CHANNEL:
            pack(codes, fields, block)
        elif HAS_ROW_FIELDS:
            encode(x, fields, block, of_row)
        else:
            encode(x, fields, block)


@njit
def copy_bytes(source: Address, goal: Address, n_bytes: int) -> None:
    for i in range(0, n_bytes, 4):
        put_i32(goal, i // 4, get_i32(source, i // 4))


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    """Turn and encode groups of rows, and put them where they belong (`GroupJob`)."""
    job = read_group_job(address)
    head_dim, rotation = job.head_dim, job.rotation
    x = job.scratch + thread * job.scratch_bytes
    codes = x + 4 * TOKENS * head_dim
    packed = codes + TOKENS * head_dim
    planes = address + 8 * GROUP_ITEMS
    # the fields of a row or, of scales by channel, of a group, one after the other
    first = packed + read_plane(planes, 0).row_bytes * SCALE_ROWS
    second, third = first, first
    if job.n_planes > 1:
        second = first + read_plane(planes, 1).row_bytes * (SCALE_ROWS if AFFINE else 1)
    if job.n_planes > 2:
        third = second + read_plane(planes, 2).row_bytes
    fields = (packed, first, second, third, job.codebook)
    while True:
        head = take_next(address)
        if head >= job.n_kv_heads:
            break
        for i in range(job.n_groups * job.n_parts):
            at, part = 2 * (i // job.n_parts), i % job.n_parts * TOKENS
            slot, source = get_i64(job.groups, at), get_i64(job.groups, at + 1) + part
            if slot < 0:
                continue
            slot += part
            place = source // PAGE_TOKENS * job.n_kv_heads + head
            tail = job.tail + place * PAGE_TOKENS * head_dim * 2
            load_rows(tail, source % PAGE_TOKENS, x, head_dim, packed)
            if rotation != 0:
                for to in range(0, 4 * TOKENS * head_dim, 4 * rotation):
                    rotate_block(x + to, x + to, rotation)
            if job.scales != 0:
                scale = broadcast_f32(job.scales, head)
                for to in range(0, TOKENS * head_dim, LANES):
                    store_f32(x, to, div(load_f32(x, to), scale))
            if BY_CHANNEL:
                encode_channels(x, fields, codes, head_dim, LAST, AFFINE, TOKENS)
            for token in range(TOKENS):
                encode_token(x + 4 * token * head_dim, codes + token * head_dim, fields, head_dim)
                for index in range(job.n_planes):
                    plane = read_plane(planes, index)
                    region = region_of(plane, slot, head)
                    offset = slot % PAGE_TOKENS
                    if plane.item_bits:
                        put_row(region, fields[index], offset + token, plane)
                    elif token == 0:
                        goal = region + offset * plane.row_bytes
                        copy_bytes(fields[index], goal, TOKENS * plane.row_bytes)
