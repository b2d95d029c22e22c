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
def third_bit(thirds, lane, SHIFT: tl.constexpr):
    """4 times a bit of byte `lane` of a word, uint8 [...]."""
    return (((thirds >> (8 * lane + SHIFT)) & 1) << 2).to(tl.uint8)


@triton.jit
def unpack_three_bits(q, thirds, lane, OFFSET: tl.constexpr, PTX: tl.constexpr):
    """The same with a third bit.

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
