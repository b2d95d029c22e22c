"""Reading the jobs of the workers of routed experts, in compiled code."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.kernels.cpu.moe.job import (
    COMBINE_ITEMS,
    COPY_ITEMS,
    EACH_ITEMS,
    GATHER_ITEMS,
    GROUP_ITEMS,
    GROUP_JOB_ITEMS,
    HALVE_ITEMS,
    PACK_TOKENS_ITEMS,
    PLAN_ITEMS,
    ROUTE_ITEMS,
    STEP_ITEMS,
    CombineJob,
    CopyJob,
    EachJob,
    GatherJob,
    GroupJob,
    HalveJob,
    PackTokensJob,
    PlanJob,
    RouteJob,
    StackStep,
)
from localkv.simd.kinds import Address
from localkv.simd.memory import get_i64, get_i64s


@njit
def read_route_job(address: Address) -> Any:
    return RouteJob(*get_i64s(address, ROUTE_ITEMS))


@njit
def read_group_job(address: Address) -> Any:
    return GroupJob(*get_i64s(address, GROUP_JOB_ITEMS))


@njit
def read_plan_job(address: Address) -> Any:
    return PlanJob(*get_i64s(address, PLAN_ITEMS))


@njit
def read_step(address: Address) -> Any:
    return StackStep(*get_i64s(address, STEP_ITEMS))


@njit
def read_each_job(address: Address) -> Any:
    return EachJob(*get_i64s(address, EACH_ITEMS))


@njit
def read_pack_tokens_job(address: Address) -> Any:
    return PackTokensJob(*get_i64s(address, PACK_TOKENS_ITEMS))


@njit
def read_gather_job(address: Address) -> Any:
    return GatherJob(*get_i64s(address, GATHER_ITEMS))


@njit
def read_copy_job(address: Address) -> Any:
    return CopyJob(*get_i64s(address, COPY_ITEMS))


@njit
def read_halve_job(address: Address) -> Any:
    return HalveJob(*get_i64s(address, HALVE_ITEMS))


@njit
def read_combine_job(address: Address) -> Any:
    return CombineJob(*get_i64s(address, COMBINE_ITEMS))


@njit
def read_group(groups: Address, index: int) -> tuple[int, int, int]:
    """A group's expert, its first row, how many rows."""
    at = 1 + GROUP_ITEMS * index
    return get_i64(groups, at), get_i64(groups, at + 1), get_i64(groups, at + 2)
