"""The same model's tensors in another type of weights, by arithmetic: its file's size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from localkv.formats import WEIGHT_FORMATS, QuantFormat
from localkv.loader.quantised_format import bits, is_quantised, quantised_format
from localkv.memory.weight_bytes import output_matrix

if TYPE_CHECKING:
    from localkv.loader.gguf_header import TensorInfo


_OFFERED = [fmt for fmt in WEIGHT_FORMATS.values() if fmt.is_offered]
QUANTS = tuple(fmt.name for fmt in sorted(_OFFERED, key=bits, reverse=True))
"""Types of weights that files are commonly offered in, from the most bits to the fewest."""


def requantised(tensors: Iterable[TensorInfo], type_name: str) -> tuple[TensorInfo, ...]:
    """The tensors with their matrices in another type; offsets mean nothing any more."""
    tensors = tuple(tensors)
    output = output_matrix(tensors)
    return tuple(
        _as(tensor, quantised_format(tensor.shape[-1], type_name, is_output=tensor.name == output))
        if is_quantised(tensor.name, tensor.shape)
        else tensor
        for tensor in tensors
    )


def _as(tensor: TensorInfo, fmt: QuantFormat) -> TensorInfo:
    n_bytes = math.prod(tensor.shape[:-1]) * fmt.row_bytes(tensor.shape[-1])
    return replace(tensor, format=fmt, n_bytes=n_bytes)


def bits_per_weight(tensors: Iterable[TensorInfo]) -> float:
    """Bits that a value takes on average, over all tensors."""
    tensors = tuple(tensors)
    return 8 * sum(t.n_bytes for t in tensors) / sum(math.prod(t.shape) for t in tensors)
