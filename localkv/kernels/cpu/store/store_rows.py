"""The worker that packs rows of K or V into pages, compiled for each type."""

from __future__ import annotations

from typing import Any

from numba import cfunc

from localkv.cache.layout import PAGE_TOKENS
from localkv.formats import KV_FORMATS
from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.store.page_row import put_row
from localkv.kernels.cpu.store.rotation import rotate_block
from localkv.simd.memory import get_i64, take_next

codec = KV_FORMATS[parameter("FORMAT", "q8_0")].part("cpu")
BLOCK, encode = codec.BLOCK, codec.encode


@cfunc("void(int64, int64)", error_model="numpy")
def worker(job: Any, thread: Any) -> None:
    """Rotate and encode rows, and put them where they belong.

    Items of the job: the counter of KV heads, n_kv_heads, head_dim, values that are rotated
    together or 0, rows (float32 [tokens, n_kv_heads, head_dim]), how many are stored, which tokens
    they are and their slots (int64 each; page * PAGE_TOKENS + offset), scratch memory and its bytes
    per thread, n_planes; then, for each plane: its address, row_bytes, item_bits, rows, columns.
    """
    n_kv_heads, head_dim, rotation = get_i64(job, 1), get_i64(job, 2), get_i64(job, 3)
    rows, n_rows, tokens, slots = (
        get_i64(job, 4),
        get_i64(job, 5),
        get_i64(job, 6),
        get_i64(job, 7),
    )
    n_planes = get_i64(job, 10)
    rotated = get_i64(job, 8) + thread * get_i64(job, 9)
    packed = rotated + 4 * head_dim
    entries = job + 8 * 11
    # a row's fields, one after the other; unused ones are not written
    first = packed + get_i64(entries, 1)
    second, third = first, first
    if n_planes > 1:
        second = first + get_i64(entries + 40, 1)
    if n_planes > 2:
        third = second + get_i64(entries + 80, 1)
    planes = (packed, first, second, third)
    while True:
        head = take_next(job)
        if head >= n_kv_heads:
            break
        for i in range(n_rows):
            row = rows + 4 * (get_i64(tokens, i) * n_kv_heads + head) * head_dim
            if rotation != 0:
                for at in range(0, 4 * head_dim, 4 * rotation):
                    rotate_block(row + at, rotated + at, rotation)
                row = rotated
            for block in range(head_dim // BLOCK):
                encode(row, planes, block)
            slot = get_i64(slots, i)
            place = slot // PAGE_TOKENS * n_kv_heads + head
            field = packed
            for plane in range(n_planes):
                entry = entries + 40 * plane
                row_bytes, item_bits = get_i64(entry, 1), get_i64(entry, 2)
                region = get_i64(entry, 0) + place * PAGE_TOKENS * row_bytes
                order = get_i64(entry, 3), get_i64(entry, 4)
                put_row(region, field, slot % PAGE_TOKENS, row_bytes, item_bits, order[0], order[1])
                field += row_bytes
