"""NumPy primitives from which the formats are made: bit fields, scales, codebooks.

They work on planes as `base.split_blocks` makes them: uint8 [..., n_blocks, plane bytes], views
with any strides and any offset. This file does not know any format's layout beyond the parts that
two of them share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Codes = NDArray[np.integer[Any]]
"""uint8 or int8; to a type checker, uint8 that were shifted may be any integers."""

with np.errstate(invalid="ignore"):  # some CPUs say so of NaNs
    _HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
"""All fp16 numbers by their bits: looking one up takes a third of the time of converting it."""

EIGHTH = np.float32(0.125)

ieee = np.errstate(all="ignore")
"""Decorates arithmetic whose infinities and NaNs are meant: random bytes decode to them, too."""


def bit_fields(packed: Bytes, n_bits: int, run: int) -> Bytes:
    """Unpack unsigned fields of `n_bits` bits (1, 2 or 4).

    ggml packs a run of values into the lowest bits of `run` bytes, the next run of values into the
    next bits of the same bytes, and so on. Then come the next `run` bytes.

    Args:
        packed: uint8 [..., n_bytes], n_bytes a multiple of `run`.

    Returns:
        uint8 [..., n_bytes * 8 / n_bits] in the order of the values, of its own memory.
    """
    mask, n_fields = (1 << n_bits) - 1, 8 // n_bits
    *lead, n_bytes = packed.shape
    runs = packed.reshape(*lead, n_bytes // run, run)
    fields = np.empty((*lead, n_bytes // run, n_fields, run), np.uint8)
    for i in range(n_fields):
        np.bitwise_and(runs >> (i * n_bits), mask, out=fields[..., i, :])
    return fields.reshape(*lead, n_bytes * n_fields)


def pack_bits(codes: Codes, n_bits: int, run: int) -> Bytes:
    """The inverse of `bit_fields`, for codes below 2 ** n_bits.

    Args:
        codes: uint8 [..., n], n a multiple of `run * 8 / n_bits`.

    Returns:
        uint8 [..., n * n_bits / 8].
    """
    n_fields = 8 // n_bits
    *lead, n = codes.shape
    fields = codes.reshape(*lead, n // (run * n_fields), n_fields, run)
    packed: Any = fields[..., 0, :].copy()
    for i in range(1, n_fields):
        packed |= fields[..., i, :] << (i * n_bits)
    result: Bytes = packed.reshape(*lead, n // n_fields)
    return result


def _middle_swapped(runs: Codes) -> Codes:
    """Four runs of 8 with the second and the third in each other's place: [..., 32]."""
    return runs.reshape(*runs.shape[:-1], 2, 2, 8).swapaxes(-3, -2).reshape(runs.shape)


def two_bit_codes(packed: Bytes) -> Codes:
    """Codes of two bits: uint8 [..., 8] -> [..., 32].

    Byte i has four codes, from the lowest bit on: i, i + 16, i + 8, i + 24. So a nibble is what
    kernels take at once: two values at a distance of 16, as in a byte of two nibbles.
    """
    return _middle_swapped(bit_fields(packed, n_bits=2, run=8))


def pack_two_bits(codes: Codes) -> Bytes:
    """The inverse of `two_bit_codes`, for codes below 4: uint8 [..., 32] -> [..., 8]."""
    return pack_bits(_middle_swapped(codes), n_bits=2, run=8)


def less(codes: Codes, offset: int) -> NDArray[np.int8]:
    """`codes - offset` of small unsigned codes, in place: uint8 -> int8, same shape."""
    codes -= offset
    return codes.view(np.int8)


def reinterpret(plane: Bytes, dtype: type[np.generic]) -> NDArray[Any]:
    """The bytes of a plane as `dtype` [..., n_blocks, values]; a view where NumPy allows one."""
    if plane.strides[-1] != 1:
        plane = np.ascontiguousarray(plane)
    return plane.view(dtype)


def as_bytes(values: NDArray[Any]) -> Bytes:
    """The bytes of each value, as a plane: [..., n] -> uint8 [..., n, bytes of a value]."""
    data = np.ascontiguousarray(values).view(np.uint8)
    return data.reshape(*values.shape, values.itemsize)


def half(plane: Bytes) -> Floats:
    """fp16 values as float32: uint8 [..., n_blocks, 2 n] -> [..., n_blocks, n]."""
    return _HALVES.take(reinterpret(plane, np.uint16))


@ieee
def half_bytes(values: Floats) -> Bytes:
    """The inverse of `half`, one value a block: float32 [..., n_blocks, 1] -> uint8 [..., 2]."""
    return values.astype(np.float16, order="C").view(np.uint8)


@ieee
def half_times(plane: Bytes, codes: Codes) -> Floats:
    """fp16 scales of blocks times the integers of their groups: float32 [..., n_blocks, n]."""
    product: Floats = half(plane) * codes
    return product


@ieee
def scaled(codes: Codes, scale: Floats, minimum: Floats | None = None) -> Floats:
    """`codes * scale - minimum` in float32, each product and difference rounded once, as ggml does.

    Args:
        codes: integers [..., n_blocks, block size].
        scale, minimum: float32 [..., n_blocks, n], one for each of n equal groups of a block.

    Returns:
        float32 [..., n_blocks * block size].
    """
    n_groups = scale.shape[-1]
    *lead, n_blocks, size = codes.shape
    values = codes.astype(np.float32, order="C")
    groups = values.reshape(*lead, n_blocks, n_groups, size // n_groups)
    groups *= scale[..., None]
    if minimum is not None:
        groups -= minimum[..., None]
    return values.reshape(*lead, n_blocks * size)
