"""Packing a page of rows in other types on the CPU: unpacked by NumPy, packed by the store."""

from __future__ import annotations

import numpy as np

from localkv.cache.arrays import Arrays, LayerCache, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.cache.repack import copied, put_copies, repack_page, unpacked
from localkv.kernels.cpu.addresses import Floats
from localkv.kernels.cpu.store.rotate import rotate_cpu
from localkv.kernels.cpu.store.store_kv import store_kv_cpu


def repack_page_cpu(arrays: Arrays, source: Segment, target: Segment, page: int) -> None:
    """As `cache/repack.py` has it, bit for bit."""
    if target.is_whole:
        repack_page(arrays, source, target, page)
        return
    sides, copies = list[Floats](), copied(arrays, source, target, page)
    for side in ("k", "v"):
        x = unpacked(arrays, source, side, page)[0].swapaxes(0, 1)
        before, after = (getattr(one, f"rotation_{side}") for one in (source, target))
        if before != after:
            x = rotate_cpu(rotate_cpu(x, before), after)
        sides.append(np.ascontiguousarray(x))
    tokens = np.arange(PAGE_TOKENS)
    rows = SegmentBatch(
        page_table=np.array([[page]]),
        lengths=(PAGE_TOKENS,),
        length_table=np.array([PAGE_TOKENS], np.int32),
        first_position=0,
        tokens=tokens,
        slots=page * PAGE_TOKENS + tokens,
    )
    store_kv_cpu(sides[0], sides[1], LayerCache((target,)), (rows,))
    put_copies(target, copies, page)
