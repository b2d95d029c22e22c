"""Reading the jobs of the workers that store rows, in compiled code."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.store.job import PlaneJob
from localkv.simd.kinds import Address
from localkv.simd.memory import reader

read_plane = reader(PlaneJob)


@njit
def region_of(plane: Any, slot: int, head: int) -> Address:
    """The address of a slot's page and KV head in a plane."""
    page = plane.plane + slot // PAGE_TOKENS * plane.page_bytes
    return page + head * PAGE_TOKENS * plane.row_bytes
