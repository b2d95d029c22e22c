"""f16: rows as in the file."""

from __future__ import annotations

from typing import Any

from localkv.simd.memory import half_bits_to_float
from localkv.simd.vector import i16, lanes_of


def load_values(b: Any, address: Any) -> Any:
    """16 values of a row as <16 x float>, at an i8*."""
    bits = b.load(b.bitcast(address, lanes_of(i16).as_pointer()), align=1)
    return half_bits_to_float(b, bits)
