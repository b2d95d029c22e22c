"""Where NumPy's arrays are in memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.simd.lanes import LANES

Floats = NDArray[np.float32]

LINE = 64
"""Bytes of a cache line: a vector that crosses two is loaded in twice the time."""


def address(x: NDArray[Any]) -> int:
    """Where the first item of an array is in memory."""
    try:  # a sixth of the time that `x.ctypes` takes
        return ctypes.addressof(ctypes.c_char.from_buffer(x.data))
    except (TypeError, ValueError):  # read-only, not contiguous or empty
        return int(x.ctypes.data)


def all_bytes(plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """All that lies between the first byte of a plane's pages [pages, ...] and the last: uint8 [n].
    Pages may be apart, or overlap where only some of them are in use."""
    n_pages = len(plane)
    n_bytes = (n_pages - 1) * plane.strides[0] + plane[0].nbytes if n_pages else 0
    return np.lib.stride_tricks.as_strided(plane, (n_bytes,), (1,))


def whole_vectors(x: Floats) -> Floats:
    """x [..., n] with zeros behind each row, up to a multiple of the lanes of a vector."""
    missing = -x.shape[-1] % LANES
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
