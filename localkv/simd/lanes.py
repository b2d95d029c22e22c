"""The lanes of a vector, for those who lay out memory for kernels, without Numba."""

from __future__ import annotations

LANES = 16
"""On every CPU; LLVM splits a vector where registers are narrower."""
