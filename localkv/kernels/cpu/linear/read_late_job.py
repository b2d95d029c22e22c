"""Reading the jobs of matrices whose panels are made late, in compiled code."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.kernels.cpu.linear.late_job import LATE_ITEMS, LateJob
from localkv.simd.kinds import Address
from localkv.simd.memory import get_i64s


@njit
def read_late_job(address: Address) -> Any:
    return LateJob(*get_i64s(address, LATE_ITEMS))
