"""The Hadamard transform of arrays on the CPU, and packing a page of rows in other types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from localkv.cache.arrays import Arrays, LayerCache, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.cache.repack import copied, put_copies, repack_page, unpacked
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.addresses import Floats, address
from localkv.kernels.cpu.attention.kernels import run
from localkv.kernels.cpu.store.jobs import RotateJob
from localkv.kernels.cpu.store.store_kv import store_kv_cpu
from localkv.system.threads import n_threads

MANY_VALUES = 1 << 16
"""From this number on, a second thread is worth its start."""


def rotate_cpu(x: Floats, block: int) -> Floats:
    """As `hadamard_transform`, bit for bit, for float32."""
    if block == 0:
        return x
    if block & (block - 1) or x.shape[-1] % block:
        raise ValueError(f"a Hadamard transform of {block} does not fit {x.shape[-1]} channels")
    if x.dtype != np.float32:
        raise BoundsError(f"a Hadamard transform of {x.dtype}")
    x = np.ascontiguousarray(x)
    out = np.empty_like(x)
    job = RotateJob(0, x.size // block, block, address(x), address(out))
    items = cast("Sequence[int]", job)  # no names among them
    run("store/rotate_rows", items, n_threads() if x.size >= MANY_VALUES else 1)
    return out


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
