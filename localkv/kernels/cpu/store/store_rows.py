"""The worker that packs rows of K or V into pages, compiled for each type."""

from __future__ import annotations

from typing import Any

from numba import cfunc

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.store.jobs import STORE_ITEMS, StoreJob
from localkv.kernels.cpu.store.pages import put_row, read_plane, region_of, rotate_block
from localkv.quant_formats import KV_FORMATS
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_i64, reader, take_next

read_store_job = reader(StoreJob)

FORMAT = KV_FORMATS[parameter("FORMAT", "q8_0")]
BLOCK, codec = FORMAT.cpu_layout.BLOCK, FORMAT.part("cpu")
encode: Any = codec.encode
start_row: Any = getattr(codec, "start_row", None)
HAS_ROW_FIELDS = len(FORMAT.row_planes) > 0


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    """Rotate and encode rows, and put them where they belong (`StoreJob`)."""
    job = read_store_job(address)
    head_dim, rotation = job.head_dim, job.rotation
    rotated = job.scratch + thread * job.scratch_bytes
    packed = rotated + 4 * head_dim
    planes = address + 8 * STORE_ITEMS
    # a row's fields, one after the other; unused ones are not written
    first = packed + read_plane(planes, 0).row_bytes
    second, third = first, first
    if job.n_planes > 1:
        second = first + read_plane(planes, 1).row_bytes
    if job.n_planes > 2:
        third = second + read_plane(planes, 2).row_bytes
    fields = (packed, first, second, third, job.codebook)
    while True:
        head = take_next(address)
        if head >= job.n_kv_heads:
            break
        for i in range(job.n_rows):
            row = job.x + 4 * (get_i64(job.tokens, i) * job.n_kv_heads + head) * head_dim
            if rotation != 0:
                for at in range(0, 4 * head_dim, 4 * rotation):
                    rotate_block(row + at, rotated + at, rotation)
                row = rotated
            if HAS_ROW_FIELDS:
                of_row = start_row(row, fields, head_dim)
                for block in range(head_dim // BLOCK):
                    encode(row, fields, block, of_row)
            else:
                for block in range(head_dim // BLOCK):
                    encode(row, fields, block)
            slot = get_i64(job.slots, i)
            field = packed
            for index in range(job.n_planes):
                plane = read_plane(planes, index)
                region = region_of(plane, slot, head)
                put_row(region, field, slot % PAGE_TOKENS, plane)
                field += plane.row_bytes
