"""What arrays of NumPy and torch have alike, so that a formula that both take is written once.

So have steps from fixed buffers where nothing is recorded and nothing is on its way.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from localkv.cache.arrays import Array, Step


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


class Unrecorded:
    """A `Recorder` whose steps run as they are."""

    def record(self, step: Step, state: Sequence[Array]) -> Step:
        return step


@dataclass(frozen=True)
class Arrived:
    """A `Readback` of a number that is on the host: an array of one item, the reader's own."""

    number: Array

    def value(self) -> int:
        return int(self.number[0])
