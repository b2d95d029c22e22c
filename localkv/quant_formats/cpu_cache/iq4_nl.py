"""iq4_nl: nibbles that select from a codebook; planes d, qs."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.simd.integer import load_nibbles_from_table

BLOCK = 32
SCALED = True
AFFINE = False

CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""ggml's `kvalues_iq4nl`."""


@njit
def decode(planes: Any, u: int) -> Any:
    return load_nibbles_from_table(planes[1], u * 16, CODEBOOK)
