"""The tensors that a model's file has to have: those that reading its weights asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from localkv.arch.spec import ModelSpec
from localkv.cache.arrays import Arrays
from localkv.errors import ModelFileError, quoted
from localkv.formats import FORMATS
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.backend import as_in_file
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.device_memory import DeviceMemory
from localkv.loader.model_header import ModelHeader
from localkv.loader.tensor_reader import TensorReader, check_tensor
from localkv.loader.weights import model_weights

FEW_VALUES = 1 << 20
"""Tensors of as many values may be decoded; all others are matrices, of which only shapes count."""


@dataclass(frozen=True)
class _NothingPrepared:
    """In place of a backend."""

    arrays: Arrays = field(default_factory=NumpyArrays)
    memory: DeviceMemory | None = None

    def prepare(self, weight: PackedTensor) -> PackedTensor:
        return as_in_file(weight)

    def prepare_embedding(self, weight: PackedTensor) -> PackedTensor:
        return as_in_file(weight)


@dataclass
class _Listing:
    """A `TensorSource` of zeros that remembers what it was asked for."""

    is_there: Callable[[str], bool]
    asked: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return self.is_there(name)

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        self.asked[name] = shape
        rows = (*shape[:-1], 4 * shape[-1])
        if math.prod(shape) <= FEW_VALUES:
            return PackedTensor(FORMATS["f32"], np.zeros(rows, np.uint8), shape)
        nothing = np.zeros(1, np.uint8)
        return PackedTensor(FORMATS["f32"], np.broadcast_to(nothing, rows), shape)

    def release(self, name: str) -> None:
        pass


def listed_tensors(
    config: ModelSpec, is_there: Callable[[str], bool]
) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a model's tensors.

    Args:
        is_there: of a tensor that a file may do without, by its name.
    """
    listing = _Listing(is_there)
    model_weights(TensorReader(listing, _NothingPrepared()), config)
    return list(listing.asked.items())


def check_tensors(header: ModelHeader, config: ModelSpec) -> None:
    """Look at all tensors that a model needs before any is read.

    Raises:
        ModelFileError: one is missing, or of the wrong shape; or a matrix has a scale beside it.
    """
    listed = listed_tensors(config, header.tensors.__contains__)
    for name, shape in listed:
        check_tensor(header, name, shape)
    names = {name for name, _ in listed}
    for name, _ in listed:
        scale = name.removesuffix(".weight") + ".scale"
        if name.endswith(".weight") and scale in header.tensors and scale not in names:
            raise ModelFileError(
                f"tensor {quoted(scale)} scales a whole matrix, which is not supported",
                hint="a file without tensors whose names end in .scale would work",
            )
