"""What becomes of a checkpoint's tensors: values that are read, changed and packed piece by piece.

Nothing is read before its turn. The operations are in `arch/checkpoint.py`'s `Weight`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from localkv.conversion.checkpoint_files import StoredTensor
from localkv.errors import ModelFileError
from localkv.quant_formats import QuantFormat

Floats: TypeAlias = NDArray[np.float32]
Index: TypeAlias = slice | NDArray[np.intp]
"""Items of a tensor's first axis."""

ALL = slice(None)
PIECE_VALUES = 1 << 22
"""Values that are packed at a time, if a row has no more."""


@dataclass(frozen=True)
class Values:
    """A tensor of numbers.

    Attributes:
        shape: row-major.
        read: gives some items of the first axis, as float32.
    """

    shape: tuple[int, ...]
    read: Callable[[Index], Floats]

    def rows(self, order: Sequence[int]) -> Values:
        chosen, shape = np.asarray(order, np.intp), self.shape
        if len(shape) <= 2:
            return Values((len(chosen), *shape[1:]), lambda index: self.read(chosen[index]))
        return Values(
            (*shape[:-2], len(chosen), shape[-1]), lambda index: self.read(index)[..., chosen, :]
        )

    def columns(self, order: Sequence[int]) -> Values:
        chosen = np.asarray(order, np.intp)
        return Values((*self.shape[:-1], len(chosen)), lambda index: self.read(index)[..., chosen])

    def reshaped(self, shape: tuple[int, ...]) -> Values:
        if math.prod(shape) != math.prod(self.shape):
            raise ModelFileError(f"a tensor of shape {list(self.shape)} can't be {list(shape)}")
        return Values(shape, lambda index: self.read(ALL).reshape(shape)[index])

    def transposed(self) -> Values:
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        if len(shape) == 2:
            return Values(shape, lambda index: self.read(ALL).T[index])
        return Values(shape, lambda index: self.read(index).swapaxes(-1, -2))

    def plus(self, term: float) -> Values:
        return Values(self.shape, lambda index: self.read(index) + np.float32(term))

    def as_decay(self) -> Values:
        return Values(self.shape, lambda index: -np.exp(self.read(index)))

    @property
    def formats(self) -> tuple[QuantFormat, ...]:
        """Formats that hold a tensor's codes, the best first."""
        return ()

    def packed(self, fmt: QuantFormat) -> Iterator[NDArray[np.uint8]]:
        """Its rows in a format, in order; uint8 [some, bytes].

        Raises:
            ModelFileError: a value leaves the format's range.
        """
        n_items = self.shape[0]
        step = max(1, PIECE_VALUES // max(1, math.prod(self.shape[1:])))
        for start in range(0, n_items, step):
            values = np.ascontiguousarray(self.read(slice(start, start + step)), np.float32)
            yield packed_values(values, fmt)


@dataclass(frozen=True)
class Coded(Values):
    """A tensor of codes that some formats hold as they are. What moves rows keeps the codes, and
    everything else gives numbers.

    Attributes:
        kinds: these formats, the best first.
        blocks: gives some items of the first axis in one of them: uint8 [items, ..., bytes].
    """

    kinds: tuple[QuantFormat, ...]
    blocks: Callable[[Index, QuantFormat], NDArray[np.uint8]]

    @property
    def formats(self) -> tuple[QuantFormat, ...]:
        return self.kinds

    def rows(self, order: Sequence[int]) -> Coded:
        chosen, made = np.asarray(order, np.intp), super().rows(order)
        if len(self.shape) == 2:
            return replace(
                self,
                shape=made.shape,
                read=made.read,
                blocks=lambda index, fmt: self.blocks(chosen[index], fmt),
            )
        return replace(
            self,
            shape=made.shape,
            read=made.read,
            blocks=lambda index, fmt: self.blocks(index, fmt)[..., chosen, :],
        )

    def reshaped(self, shape: tuple[int, ...]) -> Values:
        made = super().reshaped(shape)
        if shape[-1] != self.shape[-1]:
            return made

        def blocks(index: Index, fmt: QuantFormat) -> NDArray[np.uint8]:
            return self.blocks(ALL, fmt).reshape(*shape[:-1], -1)[index]

        return Coded(shape, made.read, self.kinds, blocks)

    def packed(self, fmt: QuantFormat) -> Iterator[NDArray[np.uint8]]:
        if fmt not in self.kinds:
            yield from super().packed(fmt)
            return
        step = max(1, PIECE_VALUES // max(1, math.prod(self.shape[1:])))
        for start in range(0, self.shape[0], step):
            yield self.blocks(slice(start, start + step), fmt)


def packed_values(values: Floats, fmt: QuantFormat) -> NDArray[np.uint8]:
    """Rows of numbers in a format: float32 [..., n] -> uint8 [..., bytes of a row]."""
    planes = fmt.codec.encode(values)
    blocks = np.concatenate([plane.reshape(-1, plane.shape[-1]) for plane in planes], -1)
    if fmt.name != "f32" and not _is_finite(values, planes, fmt) and np.isfinite(values).all():
        raise ModelFileError(
            f"a value of {np.abs(values).max():g} leaves the range of {fmt.name.upper()}",
            hint="--outtype bf16 and f32 hold it",
        )
    return blocks.reshape(*values.shape[:-1], -1)


def _is_finite(values: Floats, planes: Sequence[NDArray[np.uint8]], fmt: QuantFormat) -> bool:
    """Whether values, or their scales, are finite in a format."""
    return (
        fmt.name == "bf16" or not np.isinf(np.ascontiguousarray(planes[0]).view(np.float16)).any()
    )


def stored(tensor: StoredTensor) -> Values:
    """A tensor of a checkpoint."""
    return Values(tensor.shape, tensor.floats)


def stacked(parts: Sequence[Values]) -> Values:
    """Tensors of one shape as one, with an axis before the others.

    Raises:
        ModelFileError: their shapes differ.
    """
    if any(part.shape != parts[0].shape for part in parts):
        raise ModelFileError("matrices of experts differ in shape")
    every, shape = np.arange(len(parts)), (len(parts), *parts[0].shape)

    def read(index: Index) -> Floats:
        return np.stack([parts[i].read(ALL) for i in every[index]])

    coded = [part for part in parts if isinstance(part, Coded)]
    kinds = tuple(fmt for fmt in parts[0].formats if all(fmt in part.formats for part in parts))
    if len(coded) < len(parts) or not kinds:
        return Values(shape, read)

    def blocks(index: Index, fmt: QuantFormat) -> NDArray[np.uint8]:
        return np.stack([coded[i].blocks(ALL, fmt) for i in every[index]])

    return Coded(shape, read, kinds, blocks)


def constant(numbers: Sequence[float]) -> Values:
    """A vector."""
    values = np.array(numbers, np.float32)
    return Values(values.shape, lambda index: values[index])
