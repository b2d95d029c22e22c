"""Reading the jobs of recurrent layers, in compiled code."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.kernels.cpu.recurrent.job import (
    CONV_ITEMS,
    GATED_CONV_ITEMS,
    OUTPUT_ITEMS,
    SCAN_ITEMS,
    ConvJob,
    GatedConvJob,
    OutputJob,
    ScanJob,
)
from localkv.simd.kinds import Address
from localkv.simd.memory import get_i64s


@njit
def read_conv_job(address: Address) -> Any:
    return ConvJob(*get_i64s(address, CONV_ITEMS))


@njit
def read_gated_conv_job(address: Address) -> Any:
    return GatedConvJob(*get_i64s(address, GATED_CONV_ITEMS))


@njit
def read_scan_job(address: Address) -> Any:
    return ScanJob(*get_i64s(address, SCAN_ITEMS))


@njit
def read_output_job(address: Address) -> Any:
    return OutputJob(*get_i64s(address, OUTPUT_ITEMS))
