"""Packed integers to fp16, exactly and without I2F, which a GPU does at a quarter of the rate.

An integer u below 1024 that is put into the low bits of 0x6400 is the fp16 number 1024 + u, so one
subtraction yields it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.triton_primitives.ptx import (
    codebook_ptx,
    five_bits_ptx,
    nibbles_ptx,
    signed_bytes_ptx,
)


@triton.jit
def plus_1024(u):
    """uint8 u -> fp16 1024 + u."""
    return (u.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def unpack_nibbles(q, OFFSET: tl.constexpr, PTX: tl.constexpr):
    """uint8 [...] -> the low nibbles less OFFSET and the high ones, fp16 [...] each."""
    if PTX:
        return tl.inline_asm_elementwise(
            nibbles_ptx(OFFSET),
            "=r,=r,=r,=r,r",
            [q],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low = plus_1024(q & 0xF) - (1024.0 + OFFSET)
        high = plus_1024(q & 0xF0) * 0.0625 - (64.0 + OFFSET)
        return low, high


@triton.jit
def unpack_five_bits(q, above, lane, OFFSET: tl.constexpr, PTX: tl.constexpr):
    """Codes of five bits less OFFSET, fp16 [...] twice as `unpack_nibbles`.

    Args:
        q: uint8 [...], bits 0 to 3 of two codes a byte.
        above: int32 [...], the same for each four bytes: bit 4 of the low nibbles' codes in bits 0
            to 3, of the high ones' in bits 16 to 19.
        lane: int32, broadcast to [...]: which of the four a byte is.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            five_bits_ptx(OFFSET),
            "=r,=r,=r,=r,r,r,r,r,r",
            [q, above],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low = (q & 0xF) | (((above >> lane) & 1) << 4).to(tl.uint8)
        high = (q >> 4) | (((above >> (lane + 16)) & 1) << 4).to(tl.uint8)
        return plus_1024(low) - (1024.0 + OFFSET), plus_1024(high) - (1024.0 + OFFSET)


@triton.jit
def _look_up(code, FIRST: tl.constexpr, SECOND: tl.constexpr):
    table = tl.where(code < 8, FIRST, SECOND)
    value = (table >> ((code & 7) * 8).to(tl.int64)) & 0xFF
    return plus_1024(value.to(tl.uint8)) - 1152.0


@triton.constexpr_function
def eight_bytes(values, first):
    """Eight of `values`, plus 128 each, as a signed number of 64 bits."""
    return int.from_bytes(
        bytes(value + 128 for value in values[first : first + 8]), "little", signed=True
    )


@triton.jit
def unpack_codebook(q, VALUES: tl.constexpr, PTX: tl.constexpr):
    """uint8 [...] -> the entries of VALUES (16 of -128 to 127) for the low and the high nibbles."""
    if PTX:
        return tl.inline_asm_elementwise(
            codebook_ptx(VALUES),
            "=r,=r,=r,=r,r",
            [q],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        first: tl.constexpr = eight_bytes(VALUES, 0)
        second: tl.constexpr = eight_bytes(VALUES, 8)
        return _look_up(q & 0xF, first, second), _look_up(q >> 4, first, second)


@triton.jit
def unpack_signed_bytes(q, PTX: tl.constexpr):
    """uint8 [...], the bits of int8 -> fp16 [...]."""
    if PTX:
        return tl.inline_asm_elementwise(
            signed_bytes_ptx(), "=r,=r,r", [q], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        return plus_1024(q ^ 0x80) - 1152.0
