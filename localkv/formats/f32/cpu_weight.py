"""f32: rows as in the file."""

from __future__ import annotations

from typing import Any

from localkv.simd.vector import f32, lanes_of


def load_values(b: Any, address: Any) -> Any:
    """16 values of a row as <16 x float>, at an i8*."""
    return b.load(b.bitcast(address, lanes_of(f32).as_pointer()), align=1)
