"""What the cache and the engine ask of a backend's arrays, so that they name no array library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from localkv.cache.kv_cache import SegmentBatch

Array: TypeAlias = Any
"""An array of the backend's: a torch tensor today."""


Step: TypeAlias = Callable[[], Array]
"""Runs on buffers that stay where they are; its result is valid until the next step."""


class Readback(Protocol):
    """A number on its way to the host."""

    def value(self) -> int:
        """Wait for it."""
        ...


class Recorder(Protocol):
    """Records steps; those of one recorder share memory, so one of them runs at a time."""

    def record(self, step: Step, state: Sequence[Array]) -> Step:
        """What repeats `step`; it may be `step` itself.

        Args:
            state: buffers that `step` changes; they are as before when this returns.
        """
        ...


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

    def to_numpy(self, array: Array) -> NDArray[Any]:
        """The values, on the host."""
        ...

    def host_floats(self, n_rows: int, n: int) -> Array:
        """float32 [n_rows, n] that the caller fills, on the host."""
        ...

    def write(self, array: Array, values: Sequence[int]) -> None:
        """Put integers into the first items of a vector; the host does not wait."""
        ...

    def place_row(self, batch: SegmentBatch, position: Array) -> None:
        """Make the one new row of a segment that of `position` (int64 [1]): length and slot.

        Nothing asks the host, so that it can be recorded.
        """
        ...

    def recorder(self) -> Recorder:
        """What repeats steps with one launch, where launches can be recorded."""
        ...

    def read_back(self, number: Array) -> Readback:
        """Start to bring int64 [1] to the host."""
        ...

    def inference(self) -> AbstractContextManager[Any]:
        """A context in which nothing is kept for gradients."""
        ...

    def n_threads(self) -> int:
        """Threads that this thread's operations take."""
        ...

    def use_threads(self, n: int) -> None:
        """Set that number, which libraries keep for each thread that calls them."""
        ...
