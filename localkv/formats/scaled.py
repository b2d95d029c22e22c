"""Packed rows times factors: of a block's fields only the scales change, where there are scales."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localkv.formats import FORMATS
from localkv.formats.base import QuantFormat, split_blocks
from localkv.formats.packed_tensor import PackedTensor

Factors = NDArray[np.float32]

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
    (plane,) = FORMATS[fmt.name].codec.encode(np.ascontiguousarray(values, np.float32))
    if fmt.name != "f32" and np.isinf(fmt.codec.decode((plane,))).any():
        raise ValueError(f"a value leaves the range of {fmt.name}")
    return plane.reshape(*values.shape[:-1], -1)
