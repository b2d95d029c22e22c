"""What the cache and the engine ask of a backend's arrays, so that they name no array library."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

Array: TypeAlias = Any
"""An array of the backend's: a torch tensor today."""


class Arrays(Protocol):
    """Makes arrays where a backend's kernels read them."""

    def bytes(self, shape: tuple[int, ...]) -> Array:
        """uint8, of any contents."""
        ...

    def floats(self, values: Sequence[float]) -> Array:
        """float32 [n]."""
        ...

    def int64(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Array:
        """[n], or [rows, n]."""
        ...

    def int32(self, values: Sequence[int]) -> Array:
        """[n]."""
        ...

    def host_floats(self, n_rows: int, n: int) -> Array:
        """float32 [n_rows, n] that the caller fills, on the host."""
        ...

    def inference(self) -> AbstractContextManager[Any]:
        """A context in which nothing is kept for gradients."""
        ...
