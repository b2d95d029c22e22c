"""Points of iq1's grid, shifted by an eighth up or down: eight times their values, as integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localkv.formats.bits import Bytes, Codes
from localkv.formats.grids import IQ1


def grid_entries(lower: Bytes, upper: Codes) -> NDArray[np.uint16]:
    """Codes of 11 bits, of which the upper 3 lie elsewhere: uint16 [..., n_blocks, 32]."""
    return (lower | (upper.reshape(lower.shape).astype(np.uint16) << 8)).astype(np.uint16)


def shifted_points(entries: NDArray[np.uint16], is_lower: Codes) -> NDArray[np.int8]:
    """`8 grid[q] + 1`, or `- 1` where `is_lower`: [..., n_blocks, n] -> int8 [..., 8 n]."""
    shifts = 1 - 2 * is_lower.astype(np.int8)
    points = 8 * IQ1.points.take(entries, axis=0) + shifts[..., None]
    return points.reshape(*entries.shape[:-1], entries.shape[-1] * IQ1.n_values)
