"""The PTX of `codebooks.py`: strings, so that a test can run them on a CPU (see `ptx.py`)."""

from __future__ import annotations

import triton

from localkv.triton_primitives.ptx import (
    BYTES_0_1,
    BYTES_0_2,
    BYTES_1_3,
    BYTES_2_3,
    pair,
    plus_1024,
)

SPREAD = 0x00810204
"""A factor that makes of bits 0 to 3 the bits 2, 10, 18 and 26, among others."""


@triton.constexpr_function
def as_halves(found, low, high):
    """The bytes of two words of table entries, 128 too large, as pairs of fp16: those of even
    places become `low`, those of odd ones `high`."""
    pairs = "".join(
        f"""
        prmt.b32 p, {word}, m, {order};
        sub.f16x2 {goals[i]}, p, o;"""
        for i, word in enumerate(found)
        for goals, order in ((low, BYTES_0_2), (high, BYTES_1_3))
    )
    return f"""
        mov.b32 m, 0x64646464;
        mov.b32 o, {pair(plus_1024(128))};{pairs}"""


@triton.constexpr_function
def sixteen_numbers_ptx():
    """$4: four bytes; from $5 on four times each: words of a table of 16 bytes -> $0, $1: the
    entries of the low nibbles less 128; $2, $3: of the high ones.

    `prmt` itself is a table of eight bytes for four nibbles; bit 3 of a nibble chooses between two.
    """
    return f"""{{
        .reg .b32 a, s, x, y, u, v, m, o, p;
        and.b32 a, $4, 0x77777777;
        shr.u32 s, $4, 1;
        lop3.b32 s, s, 0x44444444, 0x32103210, 0xEA;
        prmt.b32 x, $5, $9, a;
        prmt.b32 y, $13, $17, a;
        prmt.b32 u, x, y, s;
        shr.u32 a, a, 16;
        shr.u32 s, s, 16;
        prmt.b32 x, $5, $9, a;
        prmt.b32 y, $13, $17, a;
        prmt.b32 v, x, y, s;{as_halves(("u", "v"), ("$0", "$1"), ("$2", "$3"))}
    }}"""


@triton.constexpr_function
def four_numbers_ptx():
    """$2: a table of 4 bytes -> $0, $1: its entries less 128 as pairs of fp16."""
    return f"""{{
        .reg .b32 p, m, o;
        mov.b32 m, 0x64646464;
        mov.b32 o, {pair(plus_1024(128))};
        prmt.b32 p, $2, m, {BYTES_0_1};
        sub.f16x2 $0, p, o;
        prmt.b32 p, $2, m, {BYTES_2_3};
        sub.f16x2 $1, p, o;
    }}"""


@triton.constexpr_function
def four_values_ptx():
    """$4: a scale, $5: what is missing to an outlier, fp16 in the lower half of a word; $6 and $7:
    four numbers as pairs of fp16 -> the lower bytes of their values ($0) and the upper ones ($1),
    and those of the outliers that each would be ($2, $3)."""
    return """{
        .reg .b32 a, b, d, o;
        prmt.b32 d, $4, 0, 0x1010;
        prmt.b32 o, $5, 0, 0x1010;
        mul.f16x2 a, $6, d;
        mul.f16x2 b, $7, d;
        prmt.b32 $0, a, b, 0x6420;
        prmt.b32 $1, a, b, 0x7531;
        add.f16x2 a, a, o;
        add.f16x2 b, b, o;
        prmt.b32 $2, a, b, 0x6420;
        prmt.b32 $3, a, b, 0x7531;
    }"""


@triton.constexpr_function
def look_up_values_ptx():
    """$8: four bytes of four codes each; from $9 on four times each: the tables of
    `four_values_ptx` and where an outlier is, of 16 nibbles, twice 8, times 4 -> $0 and $1, ...:
    the values of the codes, from the lowest bits on.

    A shift of an outlier's bit out of a word leaves none: the values of other words have none.
    """
    words = "".join(
        f"""
        {move}
        shl.b32 o, 4, {place};
        lop3.b32 c, {word}, 0x33333333, o, 0xEA;
        prmt.b32 l, $9, $17, c;
        prmt.b32 h, $13, $21, c;
        prmt.b32 ${2 * i}, l, h, 0x6240;
        prmt.b32 ${2 * i + 4}, l, h, 0x7351;
        shr.u32 c, c, 16;
        prmt.b32 l, $9, $17, c;
        prmt.b32 h, $13, $21, c;
        prmt.b32 ${2 * i + 1}, l, h, 0x6240;
        prmt.b32 ${2 * i + 5}, l, h, 0x7351;"""
        for i, (move, word, place) in enumerate(
            (("", "$8", "$25"), ("shr.u32 w, $8, 2;\n        sub.u32 p, $25, 32;", "w", "p"))
        )
    )
    return f"""{{
        .reg .b32 c, w, o, p, l, h;{words}
    }}"""


@triton.constexpr_function
def eight_numbers_ptx():
    """$8: as `four_numbers_ptx`; from $9 on four times each: third bits as
    `low_bits.unpack_three_bits` has them, and the words of a table of 8 bytes."""
    thirds = [
        f"""
        prmt.b32 e, t, 0, 0x444{byte};
        mul.lo.u32 e, e, 0x{SPREAD << shift:08X};
        lop3.b32 {word}, e, 0x{0x04040404 << shift:08X}, {word}, 0xEA;"""
        for byte, shift, word in ((0, 0, "a"), (1, 4, "a"), (2, 0, "b"), (3, 4, "b"))
    ]
    masked = "and.b32 t, $9, 0x0F0F0F0F;"
    return _quarters("$13", "$17", masked + "".join(thirds[:2]), "".join(thirds[2:]))


@triton.constexpr_function
def _quarters(first, second, third_of_a, third_of_b):
    """Nibbles of `a` are the first and third codes of each byte, those of `b` the others."""
    return f"""{{
        .reg .b32 a, b, e, t, u, v, m, o, p;
        and.b32 a, $8, 0x33333333;
        shr.u32 b, $8, 2;
        and.b32 b, b, 0x33333333;
        {third_of_a}{third_of_b}
        prmt.b32 u, {first}, {second}, a;
        shr.u32 a, a, 16;
        prmt.b32 v, {first}, {second}, a;{as_halves(("u", "v"), ("$0", "$1"), ("$4", "$5"))}
        prmt.b32 u, {first}, {second}, b;
        shr.u32 b, b, 16;
        prmt.b32 v, {first}, {second}, b;{as_halves(("u", "v"), ("$2", "$3"), ("$6", "$7"))}
    }}"""


@triton.constexpr_function
def outlier_ptx():
    """$1, $2, $3, $4: pairs of fp16 -> $0: $1, plus $3 where $2 is $4."""
    return """{
        .reg .b32 e;
        set.eq.f16x2.f16x2 e, $2, $4;
        fma.rn.f16x2 $0, e, $3, $1;
    }"""
