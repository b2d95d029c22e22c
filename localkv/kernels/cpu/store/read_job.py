"""Reading the jobs of the workers that store rows, in compiled code."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.store.job import (
    GROUP_ITEMS,
    PLANE_ITEMS,
    ROTATE_ITEMS,
    STORE_ITEMS,
    GroupJob,
    PlaneJob,
    RotateJob,
    StoreJob,
)
from localkv.simd.kinds import Address
from localkv.simd.memory import get_i64s


@njit
def read_store_job(address: Address) -> Any:
    return StoreJob(*get_i64s(address, STORE_ITEMS))


@njit
def read_group_job(address: Address) -> Any:
    return GroupJob(*get_i64s(address, GROUP_ITEMS))


@njit
def read_rotate_job(address: Address) -> Any:
    return RotateJob(*get_i64s(address, ROTATE_ITEMS))


@njit
def read_plane(planes: Address, index: int) -> Any:
    return PlaneJob(*get_i64s(planes + 8 * PLANE_ITEMS * index, PLANE_ITEMS))


@njit
def region_of(plane: Any, slot: int, head: int) -> Address:
    """The address of a slot's page and KV head in a plane."""
    page = plane.plane + slot // PAGE_TOKENS * plane.page_bytes
    return page + head * PAGE_TOKENS * plane.row_bytes
