"""Moving packed rows into the CPU's order of a page (`formats/cpu/page_order.py`), by KV head."""

from __future__ import annotations

from numba import cfunc

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.store.job import SCATTER_ITEMS
from localkv.kernels.cpu.store.page_row import put_row
from localkv.kernels.cpu.store.read_job import read_plane, read_scatter_job
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_i64, take_next


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    """Scatter the rows of some planes (`ScatterJob`)."""
    job = read_scatter_job(address)
    while True:
        head = take_next(address)
        if head >= job.n_kv_heads:
            break
        for index in range(job.n_planes):
            plane = read_plane(address + 8 * SCATTER_ITEMS, index)
            for i in range(job.n_rows):
                slot = get_i64(job.slots, i)
                place = slot // PAGE_TOKENS * job.n_kv_heads + head
                region = plane.plane + place * PAGE_TOKENS * plane.row_bytes
                row = plane.packed + (i * job.n_kv_heads + head) * plane.row_bytes
                put_row(region, row, slot % PAGE_TOKENS, plane)
