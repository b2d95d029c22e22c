"""f32, f16 and bf16 on a CPU. Rows of weights lie as in the file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.shared.cpu.rounding import put_half
from localkv.simd import vector
from localkv.simd.memory import (
    get_f32,
    get_i32,
    half_bits_to_float,
    load_bf16,
    load_f16,
    load_f32,
    put_f32,
    put_u16,
)
from localkv.simd.vector import constant, i16, i32, lanes_of


@njit
def decode_f32(planes: Any, u: int) -> Any:
    return (load_f32(planes[0], u * 16),)


@njit
def encode_f32(x: Any, planes: Any, u: int) -> None:
    for i in range(16 * u, 16 * u + 16):
        put_f32(planes[0], i, get_f32(x, i))


def load_values_f32(b: Any, address: Any) -> Any:
    """16 values of a row as <16 x float>, at an i8*."""
    return b.load(b.bitcast(address, lanes_of(vector.f32).as_pointer()), align=1)


@njit
def decode_f16(planes: Any, u: int) -> Any:
    return (load_f16(planes[0], u * 16),)


@njit
def encode_f16(x: Any, planes: Any, u: int) -> None:
    for i in range(16 * u, 16 * u + 16):
        put_half(planes[0], i, get_f32(x, i))


def load_values_f16(b: Any, address: Any) -> Any:
    """16 values of a row as <16 x float>, at an i8*."""
    bits = b.load(b.bitcast(address, lanes_of(i16).as_pointer()), align=1)
    return half_bits_to_float(b, bits)


@njit
def decode_bf16(planes: Any, u: int) -> Any:
    return (load_bf16(planes[0], u * 16),)


@njit
def encode_bf16(x: Any, planes: Any, u: int) -> None:
    for i in range(16 * u, 16 * u + 16):
        bits = np.int64(get_i32(x, i)) & 0xFFFFFFFF
        if bits & 0x7FFFFFFF > 0x7F800000:
            put_u16(planes[0], i, 0x7FC0)
        else:
            put_u16(planes[0], i, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def load_values_bf16(b: Any, address: Any) -> Any:
    """16 values of a row as <16 x float>, at an i8*."""
    bits = b.load(b.bitcast(address, lanes_of(i16).as_pointer()), align=1)
    return b.bitcast(b.shl(b.zext(bits, lanes_of(i32)), constant(i32, 16)), lanes_of(vector.f32))


f32 = SimpleNamespace(decode=decode_f32, encode=encode_f32, load_values=load_values_f32)
f16 = SimpleNamespace(decode=decode_f16, encode=encode_f16, load_values=load_values_f16)
bf16 = SimpleNamespace(decode=decode_bf16, encode=encode_bf16, load_values=load_values_bf16)
