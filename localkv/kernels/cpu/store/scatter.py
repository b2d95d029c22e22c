"""Moving packed rows into the CPU's order of a page (`formats/cpu/page_order.py`), by KV head."""

from __future__ import annotations

from typing import Any

from numba import cfunc

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.store.page_row import put_row
from localkv.simd.memory import get_i64, take_next


@cfunc("void(int64, int64)", error_model="numpy")
def worker(job: Any, thread: Any) -> None:
    """Scatter the rows of some planes.

    Items of the job: the counter of KV heads, n_kv_heads, n_rows, the address of their slots
    (int64 [n_rows]: page * PAGE_TOKENS + offset), n_planes; then, for each plane: addresses of the
    rows (uint8 [n_rows, n_kv_heads, row_bytes]) and of the plane, row_bytes, item_bits, rows,
    columns.
    """
    n_kv_heads, n_rows, slots = get_i64(job, 1), get_i64(job, 2), get_i64(job, 3)
    while True:
        head = take_next(job)
        if head >= n_kv_heads:
            break
        for plane in range(get_i64(job, 4)):
            entry = job + (5 + plane * 6) * 8
            rows, target, row_bytes = get_i64(entry, 0), get_i64(entry, 1), get_i64(entry, 2)
            item_bits, rows_of, columns = get_i64(entry, 3), get_i64(entry, 4), get_i64(entry, 5)
            for i in range(n_rows):
                slot = get_i64(slots, i)
                place = slot // PAGE_TOKENS * n_kv_heads + head
                region = target + place * PAGE_TOKENS * row_bytes
                row = rows + (i * n_kv_heads + head) * row_bytes
                put_row(region, row, slot % PAGE_TOKENS, row_bytes, item_bits, rows_of, columns)
