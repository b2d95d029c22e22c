"""Codes to the numbers of a codebook that is known when a kernel runs, and outliers beside them.

Tables are words of four bytes, numbers plus 128 (`shared/codebooks.table_of`). They are in
registers: in memory each code would be a load.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.triton_primitives.ptx import (
    OF_GROUP,
    eight_values_ptx,
    four_values_ptx,
    limited_ptx,
    look_up_eight_ptx,
    look_up_sixteen_ptx,
    look_up_values_ptx,
    number_pairs_ptx,
    outlier_ptx,
)
from localkv.triton_primitives.unpack import plus_1024, third_bit

GROUP_BITS = tl.constexpr(OF_GROUP)


@triton.jit
def _entry(code, words):
    """1024 and the entries of codes (uint8) in a table of one word, of two, or of four, fp16."""
    word = words[0] + tl.zeros(code.shape, tl.int32)
    for i in tl.static_range(1, len(words)):
        word = tl.where(code // 4 == i, words[i], word)
    entry = (word >> ((code & 3) * 8).to(tl.int32)) & 0xFF
    return plus_1024(entry.to(tl.uint8))


@triton.jit
def _number(code, words):
    """Their entries as numbers."""
    return _entry(code, words) - 1152.0


@triton.jit
def numbers_of_nibbles(q, words):
    """uint8 [...] -> the numbers of its low and of its high nibble, fp16 [...] each; four words,
    with halves of numbers. What `look_up_sixteen` is compared with, as those below with the
    others."""
    return (_entry(q & 15, words) - 1088.0) * 2.0, (_entry(q >> 4, words) - 1088.0) * 2.0


@triton.jit
def numbers_of_two_bits(q, words):
    """uint8 [...] -> the numbers of its four codes, from the lowest bit on, fp16 [...] each; one
    word."""
    a, b = _number(q & 3, words), _number((q >> 2) & 3, words)
    return a, b, _number((q >> 4) & 3, words), _number(q >> 6, words)


@triton.jit
def numbers_of_three_bits(q, thirds, lane, words):
    """Numbers of three bits, the third where `unpack_three_bits` has it; two words."""
    a, b = (q & 3) | third_bit(thirds, lane, 0), ((q >> 2) & 3) | third_bit(thirds, lane, 2)
    c, e = ((q >> 4) & 3) | third_bit(thirds, lane, 4), (q >> 6) | third_bit(thirds, lane, 6)
    return _number(a, words), _number(b, words), _number(c, words), _number(e, words)


@triton.jit
def words_of_table(table, N: tl.constexpr):
    """The first N words (1, 2 or 4) of a table (int32 *) that no kernel writes; after four of them
    a word of bytes 0x58. For GPUs alone.

    They are loaded by assembly that counts as pure, as no load of Triton's does, so that it is
    moved out of loops. Byte permutations take four words, which are to be in each thread's
    registers. So the address has a part that is always 0: it must not look the same for all
    threads. Nor does the fifth word look like a constant: as one it would take the place of the
    permutation's selector in the instruction, which would need a register each time.
    """
    address = table.to(tl.int64)
    if N == 1:
        word = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=True, pack=1
        )
        return (word,)
    elif N == 2:
        return tl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];",
            "=r,=r,l",
            [address],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
                .reg .b32 t, n;
                .reg .b64 a;
                mov.u32 t, %tid.x;
                mov.u32 n, %ntid.x;
                div.u32 t, t, n;
                cvt.u64.u32 a, t;
                add.u64 a, a, $5;
                ld.global.nc.v4.b32 {$0, $1, $2, $3}, [a];
                add.u32 $4, t, 0x58585858;
            }""",
            "=r,=r,=r,=r,=r,l",
            [address],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def limited_scales_and_missing(d, o, LARGEST: tl.constexpr, MOST: tl.constexpr):
    """Two scales of 64 values each, limited, and what is missing to their outlier, limited: int32
    [...] each, two fp16 numbers; the latter are the same. For GPUs alone.

    Args:
        d: int32 [...], two fp16 numbers each.
        o: int32 [...], an outlier's fp16, and above it its place.
        LARGEST: for scales.
        MOST: for values of 127 and what is missing to them.
    """
    return tl.inline_asm_elementwise(
        limited_ptx(LARGEST, MOST),
        "=r,=r,r,r",
        [d, o],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def outlier_in_groups(missing, o):
    """What is missing, of `limited_scales_and_missing`, for each of the four pairs of values of a
    group in turn, and the number of the outlier's group: int32 [...] each.

    That a value gets what is missing to it takes two comparisons, of groups and of places in
    them, and each does for several values.
    """
    return tl.inline_asm_elementwise(
        outlier_ptx(),
        "=r,=r,=r,=r,=r,r,r",
        [missing, o],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def group_number(channel):
    """The group of a channel among 64, as `outlier_in_groups` has it."""
    return 0x64006400 | (channel & GROUP_BITS) * 0x10001


@triton.jit
def tables_of_four(d, missing, table):
    """What four numbers stand for, and what they do as outliers, fp16: four words of bytes, int32
    [...] each, for `look_up_four`. For GPUs alone.

    Args:
        d: a scale, fp16 in the lower half of int32 [...].
        missing: of `limited_scales_and_missing`.
        table: the numbers, int32 *, which no kernel writes.
    """
    (word,) = words_of_table(table, 1)
    first, second = tl.inline_asm_elementwise(
        number_pairs_ptx(1), "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    return tl.inline_asm_elementwise(
        four_values_ptx(),
        "=r,=r,=r,=r,r,r,r,r",
        [d, missing, first, second],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def look_up_four(q, tables, nibble):
    """uint8 [...] -> the values of its four codes, from the lowest bit on, fp16 [...] each. For
    GPUs alone.

    Args:
        tables: of `tables_of_four`, int32 [...] each, the same for each four bytes of `q`.
        nibble: int32 [...], the same for each four bytes: 4 times the place of the outlier among
            their codes, if it is one of them. Places are counted among the eight nibbles that are
            the first and third codes of bytes, then among the second and fourth ones.
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
def tables_of_eight(d, table):
    """What eight numbers stand for, as `tables_of_four` has it, without outliers."""
    words = words_of_table(table, 2)
    pairs = tl.inline_asm_elementwise(
        number_pairs_ptx(2),
        "=r,=r,=r,=r,r,r",
        [words[0], words[1]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    return tl.inline_asm_elementwise(
        eight_values_ptx(),
        "=r,=r,=r,=r,r,r,r,r,r",
        [d, pairs[0], pairs[1], pairs[2], pairs[3]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def look_up_eight(q, thirds, tables, outlier, group):
    """Look up codes with a third bit where `unpack_three_bits` has it; see `look_up_four`.

    Args:
        tables: of `tables_of_eight`; these and all that follow are int32 [...], the same for each
            four bytes of `q`.
        outlier: of `outlier_in_groups`.
        group: number of the first codes' group.
    """
    return tl.inline_asm_elementwise(
        look_up_eight_ptx(),
        "=r,=r,=r,=r,=r,=r,=r,=r" + ",r" * 45,
        [
            q,
            thirds,
            tables[0],
            tables[1],
            tables[2],
            tables[3],
            outlier[0],
            outlier[1],
            outlier[2],
            outlier[3],
            outlier[4],
            group,
        ],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def look_up_sixteen(q, words, d, o, half, turn):
    """uint8 [...] -> the values of its low and of its high nibble over 16, fp16 [...] each. For
    GPUs alone.

    A thread has runs of bytes of a row and block, of sixteen if it has as many, of eight or four.

    Args:
        words: of `words_of_table`, five.
        d, o: int32 [...], the same for each 32 bytes of `q`: two fp16 scales, and an outlier's fp16
            with its place above it.
        half, turn: int32 [...], of `places_of_nibbles`.
    """
    return tl.inline_asm_elementwise(
        look_up_sixteen_ptx(),
        "=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r" + ",r" * 148,
        [q, words[0], words[1], words[2], words[3], words[4], d, o, half, turn],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=16,
    )


@triton.jit
def places_of_nibbles(N: tl.constexpr):
    """For N bytes of nibbles, 16 of each block, where an outlier can be: int32 [N] each.

    The first is the selector of what is missing to an outlier and of the block's scale. The second
    is a bit, which the number of the outlier's pair among 32 must turn to the left. That tells the
    pair's place, counted from the byte's on.
    """
    byte = tl.arange(0, N)
    second = byte // 16 % 2
    return 0x5410 + 0x2200 * second, 1 << ((-16 * second - byte % 16 // 2) & 31)
