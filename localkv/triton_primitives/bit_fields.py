"""Codes whose bits lie in two places, as those of 2, 3, 5 and 6 bits do."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.triton_primitives.ptx import bit_field_ptx
from localkv.triton_primitives.unpack import plus_1024


@triton.jit
def unpack_bit_field(
    q,
    above,
    SHIFT: tl.constexpr,
    N_BITS: tl.constexpr,
    ABOVE_SHIFT: tl.constexpr,
    ABOVE_BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    PTX: tl.constexpr,
):
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
    q,
    above,
    lane,
    SHIFT: tl.constexpr,
    N_BITS: tl.constexpr,
    ABOVE_SHIFT: tl.constexpr,
    ABOVE_BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    PTX: tl.constexpr,
):
    """As `unpack_bit_field`, where the bytes of `above` come as words.

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
