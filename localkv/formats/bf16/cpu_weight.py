"""bf16: rows as in the file."""

from __future__ import annotations

from typing import Any

from localkv.simd.vector import constant, f32, i16, i32, lanes_of


def load_values(b: Any, address: Any) -> Any:
    """16 values of a row as <16 x float>, at an i8*."""
    bits = b.load(b.bitcast(address, lanes_of(i16).as_pointer()), align=1)
    return b.bitcast(b.shl(b.zext(bits, lanes_of(i32)), constant(i32, 16)), lanes_of(f32))
