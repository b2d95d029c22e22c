"""A tensor in one of the number formats: its packed bytes, its shape, and how to read a part of it.

Weights are held like this from the file to the kernel: the bytes are a view of the mapped file and
are never decoded as a whole. `scaled` multiplies packed rows with factors: where a type's blocks
have scales, these are the only bytes that change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.quant_formats.base import TILE_VALUES, Array, QuantFormat, split_blocks

Factors = NDArray[np.float32]


@dataclass(frozen=True)
class PackedTensor:
    """A packed tensor of logical shape `shape` (row-major: the last axis runs along a row).

    Attributes:
        format: how a row is packed.
        rows: uint8 [..., bytes of a row], the leading axes are as in `shape`: an array of
            NumPy's or of the backend's.
        shape: logical shape, e.g. [n_out, n_in] or [n_experts, n_out, n_in].
        halves_activations: activations are rounded to f16 before they meet it, as ggml does for
            F16 weights (`vec_dot_type` in ggml-cpu.c).
    """

    format: QuantFormat
    rows: Array
    shape: tuple[int, ...]
    halves_activations: bool = False

    @property
    def reads_rows(self) -> bool:
        """Products read `rows`; false for a kind that a backend has laid out differently."""
        return True

    @property
    def operands(self) -> tuple[Any, ...]:
        """The arrays that products read."""
        return (self.rows,)

    @property
    def n_bytes(self) -> int:
        n_bytes: int = self.rows.nbytes
        return n_bytes

    def __getitem__(self, index: int | slice | Array) -> PackedTensor:
        """Index the leading axis, still packed; a single row has none."""
        if len(self.shape) == 1:
            raise TypeError("a packed row cannot be indexed")
        rows = self.rows[index]
        shape = (*rows.shape[:-1], self.shape[-1])
        return PackedTensor(self.format, rows, shape, self.halves_activations)

    def decode(self) -> NDArray[np.float32]:
        """All values, [*shape], of rows in the host's memory; for small tensors and tiles.

        They may be a view of the mapped file, so they must not be written to.
        """
        return self.format.codec.decode(split_blocks(self.format, np.asarray(self.rows)))

    def row_tiles(self) -> Iterator[tuple[slice, PackedTensor]]:
        """Pieces of the leading axis that hold at most `TILE_VALUES` values (at least one row)."""
        n_rows = self.shape[0]
        step = max(1, TILE_VALUES // math.prod(self.shape[1:]))
        for start in range(0, n_rows, step):
            tile = slice(start, min(start + step, n_rows))
            yield tile, self[tile]


_HALVES = ("d", "dmin", "m")
"""Fields that are fp16 numbers, which all values of a block are multiplied with, or minima."""


def has_scales(fmt: QuantFormat) -> bool:
    """Whether a row of packed values is scaled by scaling some of its fields.

    IQ1_M spreads its scale over other fields, NVFP4 and MXFP4 have scales of other kinds.
    """
    return any(plane.name == "d" and plane.n_bytes == 2 for plane in fmt.planes)


def is_float(fmt: QuantFormat) -> bool:
    """Whether each value is a number of its own."""
    return fmt.block_size == 1


def can_scale_rows(fmt: QuantFormat) -> bool:
    return is_float(fmt) or has_scales(fmt)


def scaled(tensor: PackedTensor, factors: Factors) -> PackedTensor:
    """A copy whose values are multiplied: for powers of two they are the same numbers but for their
    exponents, unless these leave the type's range.

    Args:
        tensor: of a float type, or one with scales (`can_scale_rows`).
        factors: broadcast to the tensor's shape; for types with scales [n_out, 1].

    Raises:
        ValueError: a type without scales, or other factors than of rows, or a product is not
            finite in the type.
    """
    fmt = tensor.format
    if is_float(fmt):
        with np.errstate(over="ignore"):
            rows = _packed(fmt, tensor.decode() * factors)
    else:
        if not has_scales(fmt) or factors.shape != (*tensor.shape[:-1], 1):
            raise ValueError(f"{fmt.name} values can't be scaled by factors {factors.shape}")
        rows = np.array(tensor.rows)
        for plane, field in zip(fmt.planes, split_blocks(fmt, rows), strict=True):
            if plane.name in _HALVES:
                halves = np.ascontiguousarray(field).view(np.float16).astype(np.float32)
                with np.errstate(over="ignore"):
                    products = (halves * factors[..., None]).astype(np.float16)
                if np.isinf(products).any() and np.isfinite(halves).all():
                    raise ValueError(f"a scale of {fmt.name} leaves the range of fp16")
                field[...] = products.view(np.uint8)
    return replace(tensor, rows=rows)


def _packed(fmt: QuantFormat, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32 [..., n] as rows of a float type: uint8 [..., bytes of a row]."""
    (plane,) = fmt.codec.encode(np.ascontiguousarray(values, np.float32))
    if fmt.name != "f32" and np.isinf(fmt.codec.decode((plane,))).any():
        raise ValueError(f"a value leaves the range of {fmt.name}")
    return plane.reshape(*values.shape[:-1], -1)
