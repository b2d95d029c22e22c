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
    four_values_ptx,
    look_up_values_ptx,
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
def numbers_of_two_bits(q, words):
    """uint8 [...] -> the numbers of its four codes, from the lowest bit on, fp16 [...] each.
    What `look_up_values` is compared with."""
    a, b = _number(q & 3, words), _number((q >> 2) & 3, words)
    return a, b, _number((q >> 4) & 3, words), _number(q >> 6, words)


@triton.jit
def _number_pairs(table):
    """The four numbers of a table (int32 *) as two words, int32, of two fp16 each.

    Loaded by assembly that counts as pure, as no load of Triton's does, so that all of it is moved
    out of loops.
    """
    address = table.to(tl.int64)
    word = tl.inline_asm_elementwise(
        "ld.global.nc.b32 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=True, pack=1
    )
    return tl.inline_asm_elementwise(
        four_numbers_ptx(), "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def tables_of_values(d, missing, table):
    """What four numbers stand for, and what they do as outliers, fp16: four words of bytes, int32
    [...] each, for `look_up_values`. For GPUs alone.

    Args:
        d, missing: a scale, and what is missing to an outlier, fp16 [...].
        table: the numbers, int32 *, which no kernel writes.
    """
    first, second = _number_pairs(table)
    return tl.inline_asm_elementwise(
        four_values_ptx(),
        "=r,=r,=r,=r,r,r,r,r",
        [_bits(d), _bits(missing), first, second],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _bits(x):
    return x.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def look_up_values(q, tables, nibble):
    """uint8 [...] -> the values of its four codes, from the lowest bit on, fp16 [...] each. For
    GPUs alone.

    Args:
        tables: of `tables_of_values`, int32 [...] each, the same for each four bytes of `q`.
        nibble: int32 [...], the same for each four bytes: 4 times the place of the outlier among
            their codes, if it is one of them: of the eight nibbles that are the first and third
            codes of bytes, then of those that are the second and fourth ones.
    """
    return tl.inline_asm_elementwise(
        look_up_values_ptx(),
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [q, tables[0], tables[1], tables[2], tables[3], nibble],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


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
