"""f16: IEEE half precision.

As a weight: rows as in the file.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.quant_formats.shared.cpu.rounding import put_half
from localkv.simd.memory import get_f32, half_bits_to_float, load_f16
from localkv.simd.vector import i16, lanes_of


@njit
def decode(planes: Any, u: int) -> Any:
    return (load_f16(planes[0], u * 16),)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    for i in range(16 * u, 16 * u + 16):
        put_half(planes[0], i, get_f32(x, i))


def load_values(b: Any, address: Any) -> Any:
    """16 values of a row as <16 x float>, at an i8*."""
    bits = b.load(b.bitcast(address, lanes_of(i16).as_pointer()), align=1)
    return half_bits_to_float(b, bits)
