"""The same model's tensors in another type of weights, by arithmetic: its file's size.

As llama-quantize makes a file of one type (`--pure` except for the output matrix): matrices in that
type, the output matrix in at least Q6_K, vectors and the routers of experts as they are. Files
whose names end in _M keep some more matrices in more bits and are up to a tenth larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from localkv.formats import FORMATS, WEIGHT_FORMATS, QuantFormat
from localkv.memory.plan import output_matrix

if TYPE_CHECKING:
    from localkv.loader.gguf_header import TensorInfo


def _bits(fmt: QuantFormat) -> float:
    return 8 * fmt.block_bytes / fmt.block_size


_OFFERED = [fmt for fmt in WEIGHT_FORMATS.values() if fmt.narrow]
QUANTS = tuple(fmt.name for fmt in sorted(_OFFERED, key=_bits, reverse=True))
"""Types of weights that files are commonly offered in, from the most bits to the fewest."""


def requantised(tensors: Iterable[TensorInfo], type_name: str) -> tuple[TensorInfo, ...]:
    """The tensors with their matrices in another type; offsets mean nothing any more."""
    tensors = tuple(tensors)
    output = output_matrix(tensors)
    return tuple(
        _as(tensor, type_name, at_least_q6=tensor.name == output) if _is_packed(tensor) else tensor
        for tensor in tensors
    )


def _is_packed(tensor: TensorInfo) -> bool:
    return (
        len(tensor.shape) > 1
        and tensor.name.endswith(".weight")
        and not tensor.name.endswith("ffn_gate_inp.weight")
    )


def _as(tensor: TensorInfo, type_name: str, at_least_q6: bool) -> TensorInfo:
    if at_least_q6 and _bits(FORMATS[type_name]) < _bits(FORMATS["q6_K"]):
        type_name = "q6_K"
    fmt, n_in = FORMATS[type_name], tensor.shape[-1]
    if n_in % fmt.block_size:
        fmt = FORMATS[fmt.narrow or "f16"]
    if n_in % fmt.block_size:
        fmt = FORMATS["f16"]
    n_bytes = math.prod(tensor.shape[:-1]) * fmt.row_bytes(n_in)
    return replace(tensor, format=fmt, n_bytes=n_bytes)


def bits_per_weight(tensors: Iterable[TensorInfo]) -> float:
    """Bits that a value takes on average, over all tensors."""
    tensors = tuple(tensors)
    return 8 * sum(t.n_bytes for t in tensors) / sum(math.prod(t.shape) for t in tensors)
