"""Blocks of random bits, and a scale of one's choice in the field of each type that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from localkv.formats import QuantFormat

MINIMA = ("m", "dmin")
"""Fields that shift a block's values."""
SCALES = ("d", "e")


def random_blocks(
    fmt: QuantFormat, shape: tuple[int, ...], generator: np.random.Generator
) -> NDArray[np.uint8]:
    """Bits as a file may have them; scales can be anything: uint8 [*shape, bytes of a block]."""
    blocks = generator.integers(256, size=(*shape, fmt.block_bytes), dtype=np.uint8)
    if fmt.name == "tq2_0":  # of the four values of two bits, a file has three
        pairs = blocks & (blocks << 1) & 0xAA
        blocks -= pairs
    return blocks


def set_scales(
    fmt: QuantFormat,
    planes: Sequence[NDArray[np.uint8]],
    scale: float,
    minimum: float,
    generator: np.random.Generator,
) -> None:
    """Write a scale, and what is subtracted, to all blocks whose other bits are random.

    Where scales are coarse, each is one of the two neighbours, and their mean square is right.

    Args:
        planes: views of the blocks' fields.
    """
    has_field = any(field.name in SCALES for field in fmt.planes)  # else it is spread over words
    for field, plane in zip(fmt.planes, planes, strict=True):
        if field.name in MINIMA:
            plane[:] = _half(minimum)
        elif field.name in SCALES and field.n_bytes == 2:
            plane[:] = _half(scale)
        elif field.name in SCALES:
            plane[:] = _small_floats(fmt, scale, plane.shape, generator)
        elif field.name == "scales" and not has_field:
            quarters = np.array([scale], np.float16).view(np.uint16) >> np.arange(0, 16, 4) & 15
            plane[..., 1::2] = plane[..., 1::2] & 15 | (quarters << 4).astype(np.uint8)


def _half(value: float) -> NDArray[np.uint8]:
    return np.array([value], np.float16).view(np.uint8)


def _small_floats(
    fmt: QuantFormat, scale: float, shape: tuple[int, ...], generator: np.random.Generator
) -> NDArray[np.uint8]:
    """Codes of a type whose scales are floats of a byte, which ascend with their codes."""
    table = cast(NDArray[np.float32], fmt.codec.SCALES).astype(np.float64)  # type: ignore[attr-defined]
    table = table[: int(table.argmax()) + 1]
    below = int(np.searchsorted(table, scale or 1.0, side="right")) - 1
    low, high = table[below] ** 2, table[below + 1] ** 2
    share_above = (np.square(scale or 1.0) - low) / (high - low)
    codes: NDArray[np.uint8] = (below + (generator.random(shape) < share_above)).astype(np.uint8)
    return codes
