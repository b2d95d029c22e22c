"""Codes of two bits, four of them in a byte, and of three bits, the third of them elsewhere."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.triton_primitives.ptx import three_bits_ptx, two_bits_ptx
from localkv.triton_primitives.unpack import plus_1024


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
def _three_bits(q, above, SHIFT: tl.constexpr, ABOVE: tl.constexpr):
    """1024 + the code at bit SHIFT of `q`, with bit ABOVE of `above`."""
    third = ((above >> ABOVE) & 1) << 2
    return plus_1024(((q >> SHIFT) & 3) | third.to(tl.uint8))


@triton.jit
def unpack_three_bits(q, above, lane, OFFSET: tl.constexpr, PTX: tl.constexpr):
    """The same with a third bit.

    Args:
        above: int32 [...], the same for each four bytes of `q`: in bits 0 to 3 the third bits of
            their first codes, in bits 16 to 19 of the second, 8 to 11 of the third, and 24 to 27 of
            the fourth ones.
        lane: int32, broadcast to [...]: which of the four a byte is.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            three_bits_ptx(OFFSET),
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r",
            [q, above],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        less: tl.constexpr = 1024.0 + OFFSET
        bits = above >> lane
        a, b = _three_bits(q, bits, 0, 0), _three_bits(q, bits, 2, 16)
        c, d = _three_bits(q, bits, 4, 8), _three_bits(q, bits, 6, 24)
        return a - less, b - less, c - less, d - less
