"""Packed integers to fp16, exactly and without I2F, which a GPU does at a quarter of the rate.

An integer u below 1024 that is put into the low bits of 0x6400 is the fp16 number 1024 + u, so one
subtraction yields it.

Codes of 2, 3, 5 and 6 bits may lie in two places. A byte may hold five digits in base 3 (`tq1_0`).
Points of grids are magnitudes with separate signs, or bytes with an offset of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.triton_primitives.ptx import (
    bit_field_ptx,
    codebook_ptx,
    digits_ptx,
    five_bits_ptx,
    nibbles_ptx,
    shifted_points_ptx,
    signed_bytes_ptx,
    signed_points_ptx,
    three_bits_ptx,
    two_bits_ptx,
)


@triton.jit
def fence(x, PTX: tl.constexpr):
    """`x` (fp16 or fp32), after an empty instruction that Triton can't move or look through.

    Triton likes to move a dot's layout of its operand above the operand's computation. After a
    decoded tile that is a loss: every warp then decodes all of it, from single bytes.
    """
    if PTX:
        if x.dtype == tl.float16:
            x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.float16, is_pure=False, pack=2)
        else:
            x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.float32, is_pure=False, pack=1)
    return x


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


@triton.jit
def unpack_two_bits(q, STEP: tl.constexpr, OFFSET: tl.constexpr, PTX: tl.constexpr):
    """uint8 [...] -> STEP (1 or 2) times its four codes, from the lowest bit on, less OFFSET: fp16
    [...] each."""
    if PTX:
        return tl.inline_asm_elementwise(
            two_bits_ptx(STEP, OFFSET),
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [q],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        less: tl.constexpr = 1024.0 + OFFSET
        a, b = (q & 3) * STEP, ((q >> 2) & 3) * STEP
        c, d = ((q >> 4) & 3) * STEP, (q >> 6) * STEP
        return plus_1024(a) - less, plus_1024(b) - less, plus_1024(c) - less, plus_1024(d) - less


@triton.jit
def third_bit(thirds, lane, SHIFT: tl.constexpr):
    """4 times a bit of byte `lane` of a word, uint8 [...]."""
    return (((thirds >> (8 * lane + SHIFT)) & 1) << 2).to(tl.uint8)


@triton.jit
def unpack_three_bits(q, thirds, lane, OFFSET: tl.constexpr, PTX: tl.constexpr):
    """Codes of three bits, each with its third bit in `thirds`.

    Args:
        thirds: int32 [...], the same for each four bytes of `q`: the third bits of their codes,
            each in the lower place of its code's two bits, and no other bits.
        lane: int32, broadcast to [...]: which of the four a byte is.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            three_bits_ptx(OFFSET),
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r",
            [q, thirds],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        less: tl.constexpr = 1024.0 + OFFSET
        a, b = (q & 3) | third_bit(thirds, lane, 0), ((q >> 2) & 3) | third_bit(thirds, lane, 2)
        c, d = ((q >> 4) & 3) | third_bit(thirds, lane, 4), (q >> 6) | third_bit(thirds, lane, 6)
        return plus_1024(a) - less, plus_1024(b) - less, plus_1024(c) - less, plus_1024(d) - less


@triton.jit
def unpack_bit_field(
    q, above,
    SHIFT: tl.constexpr, N_BITS: tl.constexpr, ABOVE_SHIFT: tl.constexpr, ABOVE_BITS: tl.constexpr,
    OFFSET: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """uint8 [...] twice -> fp16 [...]: N_BITS of `q` from bit SHIFT on, and above them ABOVE_BITS
    of `above` from bit ABOVE_SHIFT on, less OFFSET. Eight bits together at most."""
    if PTX:
        return tl.inline_asm_elementwise(
            bit_field_ptx(SHIFT, N_BITS, ABOVE_SHIFT, ABOVE_BITS, OFFSET),
            "=r,=r,r,r",
            [q, above],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        code = (q >> SHIFT) & ((1 << N_BITS) - 1)
        code |= ((above >> ABOVE_SHIFT) & ((1 << ABOVE_BITS) - 1)) << N_BITS
        return plus_1024(code) - (1024.0 + OFFSET)


@triton.jit
def unpack_bit_field_of_words(
    q, above, lane,
    SHIFT: tl.constexpr, N_BITS: tl.constexpr, ABOVE_SHIFT: tl.constexpr, ABOVE_BITS: tl.constexpr,
    OFFSET: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Do what `unpack_bit_field` does, where the bytes of `above` come as words.

    Args:
        above: int32 [...], the same for each four bytes of `q`; only their own bytes of it count.
        lane: int32, broadcast to [...]: which of the four a byte is.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            bit_field_ptx(SHIFT, N_BITS, ABOVE_SHIFT, ABOVE_BITS, OFFSET),
            "=r,=r,r,r,r,r,r",
            [q, above],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return unpack_bit_field(
            q,
            (above >> (8 * lane)).to(tl.uint8),
            SHIFT,
            N_BITS,
            ABOVE_SHIFT,
            ABOVE_BITS,
            OFFSET,
            False,
        )


@triton.jit
def _next_digit(rest):
    product = rest.to(tl.uint16) * 3
    return plus_1024((product >> 8).to(tl.uint8)) - 1025.0, (product & 0xFF).to(tl.uint8)


@triton.jit
def unpack_five_digits(q, PTX: tl.constexpr):
    """uint8 [...] -> five times fp16 [...], the digits of q / 256 in base 3, less 1.

    Times 3, a fraction's first digit stands above the point, and the rest below.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            digits_ptx(),
            "=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,r",
            [q],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        a, rest = _next_digit(q)
        b, rest = _next_digit(rest)
        c, rest = _next_digit(rest)
        d, rest = _next_digit(rest)
        e, rest = _next_digit(rest)
        return a, b, c, d, e


@triton.jit
def unpack_signed_points(magnitudes, signs, FIRST: tl.constexpr, PTX: tl.constexpr):
    """uint8 [..., n] -> fp16 [..., n], for n of 4 or 8, which a thread holds in order.

    Args:
        signs: int32, broadcast to [..., n], the same for each n: value 2 i is negative if bit
            FIRST + i is set, value 2 i + 1 if bit FIRST + i + 16 is.
    """
    N: tl.constexpr = magnitudes.shape[len(magnitudes.shape) - 1]
    if PTX:
        return tl.inline_asm_elementwise(
            signed_points_ptx(FIRST, N),
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r" if N == 8 else "=r,=r,r,r,r,r,r",
            [magnitudes, signs],
            dtype=tl.float16,
            is_pure=True,
            pack=N,
        )
    else:
        j = tl.arange(0, N)
        bit = FIRST + j // 2 + 16 * (j % 2)
        for _ in tl.static_range(len(magnitudes.shape) - 1):
            bit = bit[None]
        values = plus_1024(magnitudes) - 1024.0
        return tl.where(((signs >> bit) & 1) != 0, -values, values)


@triton.jit
def unpack_shifted_points(points, offsets, PTX: tl.constexpr):
    """uint8 [...] -> fp16 [...], less n.

    Args:
        offsets: int32, broadcast to [...], the same for each four bytes: twice 1024 + n in fp16.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            shifted_points_ptx(),
            "=r,=r,r,r,r,r,r",
            [points, offsets],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        offset = (offsets & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        return plus_1024(points) - offset
