"""A GPU's memory is full: one line with the allocation, its size, and settings that would fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import clear_frames
from typing import Protocol

from localkv.errors import LocalKVError, byte_size


@dataclass(frozen=True)
class Room:
    """Bytes of a GPU's memory.

    Attributes:
        free: that can be had, those that torch keeps for later included.
        taken: that this process' tensors take.
        total: of the GPU.
    """

    free: int
    taken: int
    total: int


class DeviceMemory(Protocol):
    """The memory of a GPU."""

    def room(self) -> Room: ...

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        ...

    def peak(self) -> int:
        """The most bytes that tensors took at a time."""
        ...

    def copy_seconds(self, n_bytes: int) -> float:
        """The least time of some that a copy of `n_bytes` took."""
        ...


@contextmanager
def naming_what_fails(
    what: str, memory: DeviceMemory | None, hint: Callable[[Room], str]
) -> Iterator[None]:
    """Turn a complaint that a GPU's memory is full into a line that names the allocation.

    torch has a class for its own; Triton, and CUDA while a graph is made, just say so.

    Args:
        what: the thing that is being allocated.
        memory: where; None is the machine's, and nothing is said of it here.
        hint: the remedy, given the memory that is free once the attempt is given up.

    Raises:
        LocalKVError: there is no room.
    """
    try:
        yield
    except RuntimeError as error:
        if memory is None or "out of memory" not in str(error):
            raise
        clear_frames(error.__traceback__)  # they hold the allocated tensors
        room = memory.room()
        asked = re.search(r"Tried to allocate ([\d.]+ [KMG]iB)", str(error))
        piece = f", which asked for {asked[1]} more" if asked else ""
        raise LocalKVError(
            f"the GPU has no room for {what}{piece}: {byte_size(room.free)} of "
            f"{byte_size(room.total)} are free",
            hint=hint(room),
        ) from error
