"""The tensors that a model's file has to have: those that reading its weights asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import ModelSpec
from localkv.cache.arrays import Arrays
from localkv.errors import ModelFileError, quoted
from localkv.formats import FORMATS
from localkv.formats.base import Plane
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.backend import as_in_file
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.device_memory import DeviceMemory
from localkv.loader.model_header import ModelHeader, model_spec
from localkv.loader.tensor_reader import TensorReader, check_tensor
from localkv.loader.weights import model_weights

_NO_BYTES = replace(FORMATS["f32"], planes=(Plane("values", 0),))
"""Rows of any length take no memory."""


class _Nothing(PackedTensor):
    """A tensor without bytes, whose values are zeros that share one place."""

    def decode(self) -> NDArray[np.float32]:
        return np.broadcast_to(np.float32(0), self.shape)


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
    """A `TensorSource` without data, which remembers what it was asked for.

    Attributes:
        is_there: whether the file has an optional tensor, by its name.
        check: called with each tensor's name and shape, before anything of that shape is made.
    """

    is_there: Callable[[str], bool]
    check: Callable[[str, tuple[int, ...]], Any] = lambda name, shape: None
    asked: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return self.is_there(name)

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        self.check(name, shape)
        self.asked[name] = shape
        return _Nothing(_NO_BYTES, np.empty((*shape[:-1], 0), np.uint8), shape)

    def release(self, name: str) -> None:
        pass


def listed_tensors(
    config: ModelSpec, is_there: Callable[[str], bool]
) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a model's tensors.

    Args:
        is_there: of a tensor that a file may do without, by its name.
    """
    return _listed(_Listing(is_there), config)


def _listed(listing: _Listing, config: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    model_weights(TensorReader(listing, _NothingPrepared()), config)
    return list(listing.asked.items())


def checked_spec(header: ModelHeader) -> ModelSpec:
    """Layers, sizes and constants of the model in a file; its tensors confirm the sizes.

    Raises:
        ModelFileError: as `model_spec` and `check_tensors`.
    """
    config = model_spec(header)
    check_tensors(header, config)
    return config


def check_tensors(header: ModelHeader, config: ModelSpec) -> None:
    """Look at all tensors that a model needs before any is read.

    No size from the keys is used before a tensor confirms it.

    Raises:
        ModelFileError: one is missing, or of the wrong shape; or a matrix has a scale beside it.
    """
    listing = _Listing(header.tensors.__contains__, partial(check_tensor, header))
    listed = _listed(listing, config)
    names = {name for name, _ in listed}
    for name, _ in listed:
        scale = name.removesuffix(".weight") + ".scale"
        if name.endswith(".weight") and scale in header.tensors and scale not in names:
            raise ModelFileError(
                f"tensor {quoted(scale)} scales a whole matrix, which is not supported",
                hint="a file without tensors whose names end in .scale would work",
            )
