"""f32, f16 and bf16: IEEE floats, and the upper half of a single (ggml's `ggml_bf16_t`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import numpy as np

from localkv.quant_formats.shared.bits import Bytes, Floats, as_bytes, half, half_bytes, reinterpret
from localkv.quant_formats.shared.cpu.page_order import codes

QUIET = 0x40
"""The bit without which a bf16 NaN whose other bits are cut off would be an infinity."""


def decode_f32(planes: Sequence[Bytes]) -> Floats:
    """uint8 [..., n, 4] -> float32 [..., n]; a view of the bytes where NumPy allows one."""
    return reinterpret(planes[0], np.float32)[..., 0]


def encode_f32(x: Floats) -> tuple[Bytes, ...]:
    """[..., n] -> uint8 [..., n, 4]."""
    return (as_bytes(x),)


def decode_f16(planes: Sequence[Bytes]) -> Floats:
    """uint8 [..., n, 2] -> float32 [..., n]."""
    return half(planes[0])[..., 0]


def encode_f16(x: Floats) -> tuple[Bytes, ...]:
    """[..., n] -> uint8 [..., n, 2], rounded to nearest even, to infinity above 65504."""
    return (half_bytes(x[..., None]),)


def decode_bf16(planes: Sequence[Bytes]) -> Floats:
    """uint8 [..., n, 2] -> float32 [..., n]."""
    upper = reinterpret(planes[0], np.uint16)[..., 0].astype(np.uint32)
    upper <<= 16
    return upper.view(np.float32)


def encode_bf16(x: Floats) -> tuple[Bytes, ...]:
    """[..., n] -> uint8 [..., n, 2], rounded to nearest even; a NaN keeps its sign and is quiet."""
    bits = x.view(np.uint32)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = np.isnan(x)
    upper[is_nan] = bits[is_nan] >> 16 | QUIET
    return (as_bytes(upper.astype(np.uint16)),)


_type = partial(SimpleNamespace, BLOCK=16, SCALED=False, AFFINE=False)
f32 = _type(PLANES=(codes(32),), decode=decode_f32, encode=encode_f32)
f16 = _type(PLANES=(codes(16),), decode=decode_f16, encode=encode_f16)
bf16 = _type(PLANES=(codes(16),), decode=decode_bf16, encode=encode_bf16)
