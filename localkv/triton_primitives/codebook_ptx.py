"""The PTX of `codebooks.py`: strings, so that a test can run them on a CPU (see `ptx.py`)."""

from __future__ import annotations

import triton

from localkv.triton_primitives.ptx import (
    BYTES_0_1,
    BYTES_0_2,
    BYTES_1_3,
    BYTES_2_3,
    half_bits,
    pair,
    plus_1024,
    three_bit_codes,
)

OF_HALVES = f"""
        mov.b32 m, 0x64646464;
        mov.b32 o, {pair(plus_1024(128))};"""
"""Constants of `number_pairs_ptx`."""


@triton.constexpr_function
def limited_ptx(largest, most):
    """$2: two scales; $3: what is missing to an outlier, fp16 in the lower half of a word -> $0:
    the scales within +-`largest`; $1: what is missing, twice, so that with a value of at most 127
    times a scale it stays within `most`."""
    return f"""{{
        .reg .b32 a, b, c;
        mov.b32 b, {pair(half_bits(largest))};
        mov.b32 c, {pair(half_bits(-largest))};
        min.NaN.f16x2 a, $2, b;
        max.NaN.f16x2 a, a, c;
        mov.b32 $0, a;
        and.b32 a, a, 0x7FFF7FFF;
        prmt.b32 b, a, 0, 0x1032;
        max.f16x2 a, a, b;
        mov.b32 b, {pair(half_bits(-127))};
        mov.b32 c, {pair(half_bits(most))};
        fma.rn.f16x2 a, a, b, c;
        xor.b32 b, a, 0x80008000;
        prmt.b32 c, $3, 0, 0x1010;
        max.f16x2 c, c, b;
        min.f16x2 $1, c, a;
    }}"""


IN_GROUP = 0b010011
"""Bits of a place among 64 that say which of eight values, two of each four that are 16 apart."""
OF_GROUP = 0b101100
"""Those that say which eight."""


@triton.constexpr_function
def outlier_ptx():
    """$5: what is missing to an outlier, fp16 twice; $6: a place above 16 other bits -> $0 to $3:
    the number where the place is a pair's in its group of eight, 0 elsewhere; $4: which group it
    is, as 1024 and the bits of `OF_GROUP`, fp16 twice."""
    pairs = "".join(
        f"""
        mov.b32 b, 0x{plus_1024(place + 1):04X}{plus_1024(place):04X};
        set.eq.f16x2.f16x2 b, a, b;
        mul.f16x2 ${i}, b, $5;"""
        for i, place in enumerate((0, 2, 16, 18))
    )
    return f"""{{
        .reg .b32 a, b, c;
        prmt.b32 c, $6, 0, 0x3232;
        mov.b32 b, 0x64006400;
        lop3.b32 a, c, {pair(IN_GROUP)}, b, 0xEA;
        lop3.b32 $4, c, {pair(OF_GROUP)}, b, 0xEA;{pairs}
    }}"""


@triton.constexpr_function
def number_pairs_ptx(n_words):
    """Words of bytes, 1 or 2, after their results -> for each two words, the bytes less 128 as
    pairs of fp16."""
    pairs = "".join(
        f"""
        prmt.b32 p, ${2 * n_words + i // 2}, m, {(BYTES_0_1, BYTES_2_3)[i % 2]};
        sub.f16x2 ${i}, p, o;"""
        for i in range(2 * n_words)
    )
    return f"""{{
        .reg .b32 p, m, o;{OF_HALVES}{pairs}
    }}"""


@triton.constexpr_function
def four_values_ptx():
    """$4: a scale, fp16 in the lower half of a word; $5: what is missing to an outlier, twice; $6
    and $7: four numbers as pairs of fp16 -> the lower bytes of their values ($0) and the upper ones
    ($1), and those of the outliers that each would be ($2, $3)."""
    return """{
        .reg .b32 a, b, d;
        prmt.b32 d, $4, 0, 0x1010;
        mul.f16x2 a, $6, d;
        mul.f16x2 b, $7, d;
        prmt.b32 $0, a, b, 0x6420;
        prmt.b32 $1, a, b, 0x7531;
        add.f16x2 a, a, $5;
        add.f16x2 b, b, $5;
        prmt.b32 $2, a, b, 0x6420;
        prmt.b32 $3, a, b, 0x7531;
    }"""


@triton.constexpr_function
def eight_values_ptx():
    """$4: a scale, fp16 in the lower half of a word; from $5 on eight numbers as pairs of fp16 ->
    the lower bytes of the first and of the last four values ($0, $1), and the upper ones ($2, $3).
    """
    return """{
        .reg .b32 a, b, d;
        prmt.b32 d, $4, 0, 0x1010;
        mul.f16x2 a, $5, d;
        mul.f16x2 b, $6, d;
        prmt.b32 $0, a, b, 0x6420;
        prmt.b32 $2, a, b, 0x7531;
        mul.f16x2 a, $7, d;
        mul.f16x2 b, $8, d;
        prmt.b32 $1, a, b, 0x6420;
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
def _add_outlier(results, group, first):
    """Add what `outlier_ptx` has from operand `first` on to pairs of values, if the outlier's group
    ($`first` + 16) is `group`."""
    sums = "".join(
        f"""
        fma.rn.f16x2 ${result}, g, ${first + 4 * i}, ${result};"""
        for i, result in enumerate(results)
    )
    return f"""
        set.eq.f16x2.f16x2 g, ${first + 16}, {group};{sums}"""


@triton.constexpr_function
def look_up_eight_ptx():
    """$8: four bytes of four codes each; from $9 on four times each: third bits as
    `low_bits.unpack_three_bits` has them, the tables of `eight_values_ptx`, the results of
    `outlier_ptx`, and what the last of these is for an outlier among the first or second codes ->
    $0 and $1, ...: the values of the codes, from the lowest bits on."""
    values = "".join(
        f"""
        prmt.b32 l, $13, $17, {word};
        prmt.b32 h, $21, $25, {word};
        prmt.b32 ${2 * i}, l, h, 0x6240;
        prmt.b32 ${2 * i + 4}, l, h, 0x7351;
        shr.u32 {word}, {word}, 16;
        prmt.b32 l, $13, $17, {word};
        prmt.b32 h, $21, $25, {word};
        prmt.b32 ${2 * i + 1}, l, h, 0x6240;
        prmt.b32 ${2 * i + 5}, l, h, 0x7351;"""
        for i, word in enumerate("ab")
    )
    return f"""{{
        .reg .b32 a, b, l, h, g, c;{three_bit_codes("$8", "$9", "a", "b")}{values}
        or.b32 c, $49, 0x00080008;
        {_add_outlier(range(4), "$49", 29)}{_add_outlier(range(4, 8), "c", 29)}
    }}"""


@triton.constexpr_function
def _entries(word):
    """The entries of a word's eight codes as bytes: those of its lower half in `u`, of the upper
    one in `v`.

    `prmt` itself is a table of eight bytes for four nibbles. Where bit 3 of a nibble is set it
    yields the sign of the entry instead, which is 0 in all of them. So of two tables one yields the
    entry and the other one nothing, if that bit is turned over for one of them.
    """
    codes = f"${16 + word}"
    return f"""
        xor.b32 n, {codes}, 0x88888888;
        prmt.b32 x, $20, $36, {codes};
        prmt.b32 y, $52, $68, n;
        xor.b32 u{word}, x, y;
        shr.u32 s, {codes}, 16;
        shr.u32 n, n, 16;
        prmt.b32 x, $20, $36, s;
        prmt.b32 y, $52, $68, n;
        xor.b32 v{word}, x, y;"""


@triton.constexpr_function
def _values(result):
    """Two entries as values: an entry n below the byte 0x58 is 128 + n / 8, of which a scale and
    `c` make twice n - 64 times the scale, over 16."""
    entries = f"{'uv'[result % 2]}{result % 8 // 2}"
    return f"""
        prmt.b32 p, {entries}, $84, {(BYTES_0_2, BYTES_1_3)[result // 8]};
        fma.rn.f16x2 ${result}, p, d, c;"""


@triton.constexpr_function
def _with_outlier(result):
    """Add what is missing to an outlier, if it is one of these values. A branch around a single
    instruction becomes a condition of that instruction, and its bits several conditions at once."""
    return f"""
        and.b32 n, k, {1 << result};
        setp.ne.b32 is, n, 0;
        @!is bra L{result};
        fma.rn.f16x2 ${result}, m, o, ${result};
        L{result}:"""


@triton.constexpr_function
def look_up_sixteen_ptx():
    """$16 to $19: sixteen bytes of nibbles; from $20 on sixteen times each: four words of a table
    of 16 bytes below 128; bytes 0x58 ($84); two scales ($100); an outlier's fp16 and above it its
    place among 64 ($116); the selector of the outlier and the scale ($132); a bit that the place
    turns to where the outlier is, from the first byte on ($148) -> $0 to $7: values of the low
    nibbles over 16, as pairs of fp16; $8 to $15: of the high ones.

    Over 16, so that 136 times a scale is finite. Scales stay within 256, and what is missing within
    32768, half of fp16's range each. `o` is 1/16 for the half of a pair that the outlier is, and 0
    for the other one; `k` has a bit for each result.
    """
    entries = "".join(_entries(word) for word in range(4))
    values = "".join(_values(result) for result in range(16))
    outliers = "".join(_with_outlier(result) for result in range(16))
    part = half_bits(1 / 16)
    return f"""{{
        .reg .b32 a, c, d, k, m, n, o, p, s, x, y, u0, u1, u2, u3, v0, v1, v2, v3;
        .reg .b16 low, high;
        .reg .pred is;
        prmt.b32 a, $116, $100, $132;
        mov.b32 n, 0x{half_bits(256):04X}{half_bits(32768):04X};
        min.NaN.f16x2 a, a, n;
        mov.b32 n, 0x{half_bits(-256):04X}{half_bits(-32768):04X};
        max.NaN.f16x2 a, a, n;
        mov.b32 {{low, high}}, a;
        mov.b32 m, {{low, low}};
        mov.b32 d, {{high, high}};
        mov.b32 c, {pair(half_bits(-136))};
        mul.f16x2 c, d, c;
        and.b32 n, $116, 0x10000;
        setp.ne.b32 is, n, 0;
        selp.b32 o, 0x{part:04X}0000, 0x{part:04X}, is;
        shr.u32 n, $116, 17;
        shf.l.wrap.b32 k, $148, $148, n;{entries}{values}{outliers}
    }}"""
