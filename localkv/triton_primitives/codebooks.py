"""Codes to the numbers of a codebook that is known when a kernel runs, and outliers beside them.

Tables are words of four bytes, numbers plus 128 (`formats/codebook_codec.table_of`). They are in
registers: in memory each code would be a load.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.triton_primitives.codebook_ptx import (
    eight_numbers_ptx,
    four_numbers_ptx,
    outlier_ptx,
    sixteen_numbers_ptx,
)
from localkv.triton_primitives.unpack import plus_1024


@triton.jit
def _number(code, words):
    """The entries of codes (uint8) in a table of one word, of two, or of four."""
    word = words[0] + tl.zeros(code.shape, tl.int32)
    for i in tl.static_range(1, len(words)):
        word = tl.where(code // 4 == i, words[i], word)
    entry = (word >> ((code & 3) * 8).to(tl.int32)) & 0xFF
    return plus_1024(entry.to(tl.uint8)) - 1152.0


@triton.jit
def numbers_of_nibbles(q, words, PTX: tl.constexpr):
    """uint8 [...] -> the numbers of its low and of its high nibble, fp16 [...] each; four words."""
    if PTX:
        return tl.inline_asm_elementwise(
            sixteen_numbers_ptx(),
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [q, words[0], words[1], words[2], words[3]],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        return _number(q & 15, words), _number(q >> 4, words)


@triton.jit
def numbers_of_two_bits(q, words, PTX: tl.constexpr):
    """uint8 [...] -> the numbers of its four codes, from the lowest bit on, fp16 [...] each; one
    word."""
    if PTX:
        return tl.inline_asm_elementwise(
            four_numbers_ptx(),
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r",
            [q, words[0]],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        a, b = _number(q & 3, words), _number((q >> 2) & 3, words)
        return a, b, _number((q >> 4) & 3, words), _number(q >> 6, words)


@triton.jit
def numbers_of_three_bits(q, above, lane, words, PTX: tl.constexpr):
    """The same with a third bit, where `low_bits.unpack_three_bits` has it; two words."""
    if PTX:
        return tl.inline_asm_elementwise(
            eight_numbers_ptx(),
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [q, above, words[0], words[1]],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        bits = above >> lane
        a = (q & 3) | ((bits & 1) << 2).to(tl.uint8)
        b = ((q >> 2) & 3) | (((bits >> 16) & 1) << 2).to(tl.uint8)
        c = ((q >> 4) & 3) | (((bits >> 8) & 1) << 2).to(tl.uint8)
        e = (q >> 6) | (((bits >> 24) & 1) << 2).to(tl.uint8)
        return _number(a, words), _number(b, words), _number(c, words), _number(e, words)


@triton.jit
def add_where_equal(x, place, missing, column, PTX: tl.constexpr):
    """x, plus `missing` where `place` is `column`; all fp16 of one shape."""
    if PTX:
        return tl.inline_asm_elementwise(
            outlier_ptx(),
            "=r,r,r,r,r",
            [x, place, missing, column],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return x + tl.where(place == column, missing, 0.0)
