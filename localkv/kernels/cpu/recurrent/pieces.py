"""The pieces of columns that a recurrent layer's memory is divided into. Imports nothing heavy."""

from __future__ import annotations

from localkv.simd.lanes import LANES

MOST_VECTORS = 4
"""Of a piece's columns: their sums stay in registers."""


def vectors_of(n_columns: int) -> int:
    """Vectors of columns that a piece has."""
    n = n_columns // LANES
    return next(vectors for vectors in range(MOST_VECTORS, 0, -1) if n % vectors == 0)
