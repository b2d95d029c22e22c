"""The memory that a model may still take where it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localkv.system.machine_memory import Budget, machine_memory

if TYPE_CHECKING:
    from localkv.kernels.backend import Backend


def free_memory(backend: Backend) -> Budget | None:
    """Memory that can still be allocated on a backend's device; None if the system doesn't say."""
    if backend.memory is not None:
        return Budget(backend.memory.room().free, "free on the GPU")
    return machine_memory()
