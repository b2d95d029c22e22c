"""Bytes of a model's tensors: what stays in the file, what is copied, and each type's share."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localkv.arch.spec import PER_LAYER_ROWS
from localkv.memory.footprints import FOOTPRINTS

if TYPE_CHECKING:
    from localkv.loader.gguf_header import TensorInfo


EMBEDDING = "token_embd.weight"


def output_matrix(tensors: Iterable[TensorInfo]) -> str:
    """The name of the matrix that logits are made with; it may be the embedding."""
    return next((t.name for t in tensors if t.name == "output.weight"), EMBEDDING)


def weight_bytes(
    tensors: Iterable[TensorInfo], backend: str, changed: Collection[str] = ()
) -> tuple[int, int]:
    """Bytes of tensors that stay in the file, and of those that are copied, as those `changed` are.

    Each counts once, also an embedding that is the output matrix as well and so is read in the file
    (single rows) and from panels; one that is only read by row does not.
    """
    tensors = list(tensors)
    output = output_matrix(tensors)
    footprint = FOOTPRINTS[backend]
    mapped = allocated = 0
    for tensor in tensors:
        if tensor.name == PER_LAYER_ROWS:
            continue
        is_looked_up = tensor.name == EMBEDDING != output
        copied = footprint.copied_bytes(tensor.format, tensor.shape, is_looked_up=is_looked_up)
        if tensor.name in changed:
            copied = copied or tensor.n_bytes
        allocated += copied
        mapped += 0 if copied else tensor.n_bytes
    return mapped, allocated


def by_row_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Bytes of a tensor of which only rows of tokens are read."""
    return sum(tensor.n_bytes for tensor in tensors if tensor.name == PER_LAYER_ROWS)


def looked_up_bytes(tensors: Iterable[TensorInfo], backend: str) -> int:
    """Bytes of an embedding that is the output matrix, too, and is kept beside its panels."""
    footprint, tensors = FOOTPRINTS[backend], list(tensors)
    if output_matrix(tensors) != EMBEDDING:
        return 0
    return sum(
        tensor.n_bytes
        for tensor in tensors
        if tensor.name == EMBEDDING
        and footprint.copied_bytes(tensor.format, tensor.shape, is_looked_up=False)
        and not footprint.copied_bytes(tensor.format, tensor.shape, is_looked_up=True)
    )


@dataclass(frozen=True)
class TypeShare:
    """The tensors of a model that are of one type: how many, their values and their bytes."""

    name: str
    n_tensors: int
    n_values: int
    n_bytes: int


def weights_by_type(tensors: Iterable[TensorInfo]) -> list[TypeShare]:
    """Tensors, values and bytes of each type, the largest share first."""
    groups: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.format.name, []).append(tensor)
    shares = [
        TypeShare(
            name,
            len(group),
            sum(math.prod(tensor.shape) for tensor in group),
            sum(tensor.n_bytes for tensor in group),
        )
        for name, group in groups.items()
    ]
    return sorted(shares, key=lambda share: -share.n_bytes)
