"""Bytes of weights as the backends keep them, by each backend's footprint; no weight is read.

`attn_kv_b` of older files becomes the two stacks that newer files hold (`loader/weights.py`), in
memory of their own, and nothing of the tensor is read again. The size of the same model's
file in another type of weights follows by arithmetic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localkv.arch.spec import PER_LAYER_ROWS, LatentAttentionSpec
from localkv.kernels import reference_footprint
from localkv.kernels.cpu import footprint as cpu_footprint
from localkv.kernels.footprint import Footprint
from localkv.kernels.gpu import footprint as gpu_footprint
from localkv.loader.quantised_format import bits, is_quantised, quantised_format
from localkv.quant_formats import FORMATS, WEIGHT_FORMATS, QuantFormat

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.loader.gguf_header import TensorInfo


FOOTPRINTS: dict[str, Footprint] = {
    "cpu": cpu_footprint,
    "cuda": gpu_footprint,
    "reference": reference_footprint,
}
"""The footprints of the backends, by the backends' names."""


_SPLIT = re.compile(r"blk\.(\d+)\.attn_kv_b\.weight")
FLOATS = ("f32", "f16", "bf16")
"""Types that are transposed as they are; others become F16."""


def split_by(tensor: TensorInfo, config: ModelSpec) -> LatentAttentionSpec | None:
    """The layer's attention, if its sizes split this tensor into parts; None for other tensors."""
    match = _SPLIT.fullmatch(tensor.name)
    if match is None or int(match[1]) >= config.n_layers:
        return None
    mixer = config.layers[int(match[1])].mixer
    return mixer if isinstance(mixer, LatentAttentionSpec) else None


def split_bytes(tensors: Iterable[TensorInfo], config: ModelSpec, backend: str) -> int:
    """Bytes of all that is made of tensors: rows, where they are the machine's, and their layout
    for products."""
    footprint, total = FOOTPRINTS[backend], 0
    for tensor in tensors:
        spec = split_by(tensor, config)
        if spec is None:
            continue
        turned = tensor.format if tensor.format.name in FLOATS else FORMATS["f16"]
        for fmt, shape in (
            (turned, (spec.n_heads, spec.latent_dim, spec.nope_dim)),
            (tensor.format, (spec.n_heads, spec.value_dim, spec.latent_dim)),
        ):
            total += footprint.copied_bytes(fmt, shape, is_looked_up=False)
            if footprint.is_of_host():
                total += math.prod(shape[:-1]) * fmt.row_bytes(shape[-1])
    return total


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
    """Bytes of the tensor from which only the rows of tokens are read."""
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
