"""Digits in base 3 to fp16, five of which a byte holds (`tq1_0`)."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.triton_primitives.ptx import digits_ptx
from localkv.triton_primitives.unpack import plus_1024


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
