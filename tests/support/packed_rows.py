"""Planes of packed rows, as the bytes of a file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def join_planes(planes: Sequence[np.ndarray]) -> np.ndarray:
    """The inverse of `split_blocks`, as a new array: uint8 [..., n * block_bytes]."""
    joined = np.concatenate(planes, -1)
    *lead, n_blocks, block_bytes = joined.shape
    return joined.reshape(*lead, n_blocks * block_bytes)
