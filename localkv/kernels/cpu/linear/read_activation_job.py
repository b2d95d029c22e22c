"""Reading the jobs of the workers between products, in compiled code."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.kernels.cpu.linear.activation_job import (
    ACTIVATION_ITEMS,
    GATE_ITEMS,
    MERGE_ITEMS,
    NORM_ITEMS,
    RESIDUAL_ITEMS,
    ROPE_ITEMS,
    SINK_ITEMS,
    SPLIT_ITEMS,
    ActivationJob,
    GateJob,
    MergeJob,
    NormJob,
    ResidualJob,
    RopeJob,
    SinkJob,
    SplitJob,
)
from localkv.simd.kinds import Address
from localkv.simd.memory import get_i64s


@njit
def read_norm_job(address: Address) -> Any:
    return NormJob(*get_i64s(address, NORM_ITEMS))


@njit
def read_gate_job(address: Address) -> Any:
    return GateJob(*get_i64s(address, GATE_ITEMS))


@njit
def read_rope_job(address: Address) -> Any:
    return RopeJob(*get_i64s(address, ROPE_ITEMS))


@njit
def read_activation_job(address: Address) -> Any:
    return ActivationJob(*get_i64s(address, ACTIVATION_ITEMS))


@njit
def read_residual_job(address: Address) -> Any:
    return ResidualJob(*get_i64s(address, RESIDUAL_ITEMS))


@njit
def read_split_job(address: Address) -> Any:
    return SplitJob(*get_i64s(address, SPLIT_ITEMS))


@njit
def read_sink_job(address: Address) -> Any:
    return SinkJob(*get_i64s(address, SINK_ITEMS))


@njit
def read_merge_job(address: Address) -> Any:
    return MergeJob(*get_i64s(address, MERGE_ITEMS))
