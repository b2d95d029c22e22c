"""Weights that stay in memory (`--mlock`): those that products read, not those they come from.

Panels are made from a file's rows, which nothing reads any more, so panels are locked instead.
"""

from __future__ import annotations

import weakref
from typing import Any

from localkv.errors import byte_size
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.backend import Backend
from localkv.kernels.layer_weights import tensors_of
from localkv.model import ModelWeights
from localkv.system.memory_lock import Range, lock, unlock


def lock_weights(weights: ModelWeights, backend: Backend) -> str | None:
    """Lock them for as long as they exist; a warning, if not all can be."""
    if backend.hardware:
        return "mlock has no effect: the weights are in the memory of the GPU"
    ranges = ranges_of(weights)
    locked = lock(ranges)
    if locked.ranges:
        weakref.finalize(weights, unlock, locked.ranges).atexit = False
    if locked.problem is None:
        return None
    n_bytes = sum(n for _, n in ranges)
    return f"only {byte_size(min(locked.n_bytes, n_bytes))} of {byte_size(n_bytes)} of weights " + (
        f"could be locked in memory: {locked.problem}"
    )


def ranges_of(weights: Any) -> list[Range]:
    """Addresses and bytes of what the products, norms and look-ups read, each once.

    Args:
        weights: all of them, or a part.
    """
    found: dict[int, int] = {}
    for tensor in tensors_of(weights):
        arrays = tensor.operands if isinstance(tensor, PackedTensor) else (tensor,)
        for array in arrays:
            address = array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data
            found[address] = max(found.get(address, 0), array.nbytes)
    return sorted(found.items())
