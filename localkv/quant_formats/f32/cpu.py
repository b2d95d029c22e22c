"""f32: 4 bytes a value.

As a weight: rows as in the file.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.simd.memory import get_f32, load_f32, put_f32
from localkv.simd.vector import f32, lanes_of


@njit
def decode(planes: Any, u: int) -> Any:
    return (load_f32(planes[0], u * 16),)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    for i in range(16 * u, 16 * u + 16):
        put_f32(planes[0], i, get_f32(x, i))


def load_values(b: Any, address: Any) -> Any:
    """16 values of a row as <16 x float>, at an i8*."""
    return b.load(b.bitcast(address, lanes_of(f32).as_pointer()), align=1)
