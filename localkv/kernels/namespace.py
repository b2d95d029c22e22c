"""What arrays of NumPy and torch have alike, so that a formula that both take is written once."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np

from localkv.cache.arrays import Array


def namespace(x: Array) -> Any:
    """NumPy or torch, whose array `x` is. Torch takes NumPy's names of arguments, too."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def is_contiguous(x: Array) -> bool:
    """Whether the items lie in memory as they are counted, the last axis first."""
    return x.flags.c_contiguous if isinstance(x, np.ndarray) else bool(x.is_contiguous())


@cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_name(x: Array) -> str:
    """ "float32", "uint8", ..."""
    return _name(x.dtype)
