"""What the cache and the engine ask of a backend's arrays, so that they name no array library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localkv.cache.batch import SegmentBatch
    from localkv.cache.layer_cache import Segment
    from localkv.formats.base import QuantFormat

Array: TypeAlias = Any
"""An array of the backend's: NumPy's on a CPU, a torch tensor elsewhere."""


Step: TypeAlias = Callable[[], Array]
"""Runs on buffers that stay where they are; its result is valid until the next step."""


Draw: TypeAlias = Callable[[Array, Array], Array]
"""(logits float32 [1, n_vocab], int64 [2]: seed and number of the draw) -> token ids int64 [1], or
NO_TOKEN; on the device, without asking the host. Of two that are equal one may serve for both."""

NO_TOKEN = -1
"""Drawn where logits are not numbers."""


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

    def strided(self, array: Array, first: int, shape: tuple[int, ...], page: int) -> Array:
        """A view of bytes as pages: uint8 [pages, ...] of this shape, the first from byte `first`
        on, each further one `page` bytes behind. Pages may overlap."""
        ...

    def zeros(self, n_rows: int, n: int) -> Array:
        """float32 [n_rows, n]; on a CPU its memory begins at a cache line."""
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

    def from_numpy(self, array: NDArray[Any]) -> Array:
        """The same values and type, where the backend's kernels read them."""
        ...

    def to_numpy(self, array: Array) -> NDArray[Any]:
        """The values, on the host."""
        ...

    def rows_of_pages(
        self, fmt: QuantFormat, side: str, plane: int, pages: Array
    ) -> NDArray[np.uint8]:
        """Pages of a plane of K ("k") or of V ("v") on the host, with rows as the format's
        reference has them: [n_pages, n_kv_heads, PAGE_TOKENS, blocks, plane bytes].
        """
        ...

    def pages_of_rows(
        self, fmt: QuantFormat, side: str, plane: int, rows: NDArray[np.uint8]
    ) -> Array:
        """The inverse of `rows_of_pages`."""
        ...

    def repack_page(self, source: Segment, target: Segment, page: int) -> None:
        """Pack a page of a segment as the page of that number of another one, whose bytes may be
        the same. Of rows that were never stored nothing is known."""
        ...

    def memory_piece(self, n_columns: int) -> int:
        """The columns of a recurrent memory that lie together, each row of them after the other; a
        divisor of `n_columns`, or all of them."""
        ...

    def floating(self, array: Array) -> Array:
        """The values in the type of activations."""
        ...

    def host_floats(self, n_rows: int, n: int) -> Array:
        """float32 [n_rows, n] that the caller fills, on the host."""
        ...

    def write(self, array: Array, values: Sequence[int]) -> None:
        """Put integers into the first items of a vector; the host does not wait."""
        ...

    def place_row(self, batch: SegmentBatch, position: Array) -> None:
        """Make the new row of each sequence that of `position` (int64 [n]): lengths and slots.

        Nothing asks the host, so that it can be recorded.
        """
        ...

    def place_group(self, batch: SegmentBatch, tail: SegmentBatch, position: Array) -> None:
        """Make the group of each sequence that which the token at `position` (int64 [n]) completes,
        or none, and its length so many rows as there are then in groups.

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
        """A context for operations: nothing is kept for gradients, and NaN is no complaint."""
        ...

    def use_threads(self, n: int) -> None:
        """Let operations that this thread calls run on `n` threads."""
        ...
