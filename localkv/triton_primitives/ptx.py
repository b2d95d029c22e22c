"""The PTX of the other modules: strings, so that a test can run them on a CPU.

All work on words of four bytes and yield pairs of fp16. `prmt` picks four bytes out of two words,
number 0 to 3 of the first and 4 to 7 of the second; `lop3` with 0xEA is `(a & b) | c`.
"""

from __future__ import annotations

import math

import triton

BYTES_0_1 = "0x4140"
"""prmt: bytes 0 and 1 of the first word, each with a byte of the second above it."""
BYTES_2_3 = "0x4342"
BYTES_0_2 = "0x4240"
BYTES_1_3 = "0x4341"
ABOVE_0_1 = "0x1404"
"""prmt: bytes 0 and 1 of the first word, each with a byte of the second below it."""
ABOVE_2_3 = "0x3424"


@triton.constexpr_function
def pair(bits):
    """Twice the same fp16 number, as a word."""
    return f"0x{bits:04X}{bits:04X}"


@triton.constexpr_function
def plus_1024(n):
    """The bits of fp16 1024 + n, for n below 1024."""
    return 0x6400 + n


@triton.constexpr_function
def nibbles_ptx(offset):
    """$4: four bytes -> $0, $1: their low nibbles less `offset`; $2, $3: the high ones.

    A high nibble n is used where it is, as 1024 + 16 n: times 1/16, less 64 + `offset`.
    """
    return f"""{{
        .reg .b32 a, b, l0, l1, h0, h1, o, s, p;
        prmt.b32 a, $4, 0, {BYTES_0_1};
        prmt.b32 b, $4, 0, {BYTES_2_3};
        lop3.b32 l0, a, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 l1, b, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 h0, a, 0x00F000F0, 0x64006400, 0xEA;
        lop3.b32 h1, b, 0x00F000F0, 0x64006400, 0xEA;
        mov.b32 o, {pair(plus_1024(offset))};
        mov.b32 s, 0x2C002C00;
        mov.b32 p, {pair(0xD400 + 16 * offset)};
        sub.f16x2 $0, l0, o;
        sub.f16x2 $1, l1, o;
        fma.rn.f16x2 $2, h0, s, p;
        fma.rn.f16x2 $3, h1, s, p;
    }}"""


@triton.constexpr_function
def five_bits_ptx(offset):
    """$4: four bytes; $5 (and $6 to $8, the same): bit 4 of their low nibbles' codes in bits 0 to
    3, of the high ones' in bits 16 to 19 -> $0 to $3 as `nibbles_ptx`.

    The factor 0x02040810 spreads four bits over the bits 4 of four bytes.
    """
    return f"""{{
        .reg .b32 l, h, e, f, a, b, c, d, o, m;
        and.b32 e, $5, 0xF;
        shr.u32 f, $5, 16;
        and.b32 f, f, 0xF;
        mul.lo.u32 e, e, 0x02040810;
        mul.lo.u32 f, f, 0x02040810;
        and.b32 e, e, 0x10101010;
        and.b32 f, f, 0x10101010;
        shr.u32 h, $4, 4;
        lop3.b32 l, $4, 0x0F0F0F0F, e, 0xEA;
        lop3.b32 h, h, 0x0F0F0F0F, f, 0xEA;
        mov.b32 m, 0x64646464;
        prmt.b32 a, l, m, {BYTES_0_1};
        prmt.b32 b, l, m, {BYTES_2_3};
        prmt.b32 c, h, m, {BYTES_0_1};
        prmt.b32 d, h, m, {BYTES_2_3};
        mov.b32 o, {pair(plus_1024(offset))};
        sub.f16x2 $0, a, o;
        sub.f16x2 $1, b, o;
        sub.f16x2 $2, c, o;
        sub.f16x2 $3, d, o;
    }}"""


@triton.constexpr_function
def half_bits(x):
    """The bits of a number that is one of fp16's normal ones."""
    mantissa, exponent = math.frexp(abs(x))
    return (x < 0) * 0x8000 + ((exponent + 14) << 10) + int((2 * mantissa - 1) * 1024)


@triton.constexpr_function
def two_bits_ptx(step, offset):
    """$8: four bytes -> $0 and $1, $2 and $3, ...: `step` times their four codes, less `offset`.

    A code n is used where it is, as 1024 + 4 n, 1024 + 16 n or 1024 + 64 n: times 1/4, 1/16 or
    1/64, less 256, 64 or 16. Steps of 2 are to become odd numbers: there the first code is moved.
    """
    codes = "".join(
        f"""
        mov.b32 s, {pair(half_bits(step / 2**place))};
        mov.b32 p, {pair(half_bits(-(1024 * step / 2**place) - offset))};
        lop3.b32 c, a{first}, {pair(3 << place)}, m, 0xEA;
        fma.rn.f16x2 ${2 * i}, c, s, p;
        lop3.b32 c, b{first}, {pair(3 << place)}, m, 0xEA;
        fma.rn.f16x2 ${2 * i + 1}, c, s, p;"""
        for i, (place, first) in enumerate(((step - 1, "f"), (2, ""), (4, ""), (6, "")))
    )
    return f"""{{
        .reg .b32 a, b, af, bf, c, m, s, p;
        prmt.b32 a, $8, 0, {BYTES_0_1};
        prmt.b32 b, $8, 0, {BYTES_2_3};
        shl.b32 af, a, {step - 1};
        shl.b32 bf, b, {step - 1};
        mov.b32 m, 0x64006400;{codes}
    }}"""


@triton.constexpr_function
def three_bit_codes(word, thirds, a, b):
    """Nibbles of codes of three bits from four bytes with two bits each and third bits as
    `unpack_three_bits` has them: `a` has the first and third codes of each byte, `b` the others.

    With 0xE4 `lop3` is `c ? a : b`, bit by bit."""
    return f"""
        shl.b32 {a}, {thirds}, 2;
        lop3.b32 {a}, {word}, {a}, 0x33333333, 0xE4;
        shr.u32 {b}, {word}, 2;
        lop3.b32 {b}, {b}, {thirds}, 0x33333333, 0xE4;"""


@triton.constexpr_function
def three_bits_ptx(offset):
    """$8: as `two_bits_ptx`; $9 (and $10 to $12, the same): third bits as `unpack_three_bits` says.

    `prmt` is a table of eight bytes: the upper ones of the fp16 numbers from 0 to 7, less
    `offset`, whose lower bytes are 0.
    """
    numbers = [half_bits(n - offset) >> 8 if n != offset else 0 for n in range(8)]
    low, high = (int.from_bytes(bytes(numbers[i : i + 4]), "little") for i in (0, 4))
    codes = "".join(
        f"""
        prmt.b32 e, l, h, {word};
        prmt.b32 ${2 * i}, e, 0, 0x2404;
        prmt.b32 ${2 * i + 4}, e, 0, 0x3414;
        shr.u32 {word}, {word}, 16;
        prmt.b32 e, l, h, {word};
        prmt.b32 ${2 * i + 1}, e, 0, 0x2404;
        prmt.b32 ${2 * i + 5}, e, 0, 0x3414;"""
        for i, word in enumerate("ab")
    )
    return f"""{{
        .reg .b32 a, b, e, l, h;
        mov.b32 l, 0x{low:08X};
        mov.b32 h, 0x{high:08X};{three_bit_codes("$8", "$9", "a", "b")}{codes}
    }}"""


@triton.constexpr_function
def codebook_ptx(values):
    """$4: four bytes -> the entries of `values` for their low nibbles ($0, $1) and high ones.

    `prmt` itself is a table of eight bytes; the bit 3 of a nibble chooses between two of them.
    """
    biased = [value + 128 for value in values]
    words = [int.from_bytes(bytes(biased[i : i + 4]), "little") for i in range(0, 16, 4)]
    look_up = "".join(
        f"""
        and.b32 i, {nibbles}, 0x7777;
        prmt.b32 x, t0, t1, i;
        prmt.b32 y, t2, t3, i;
        shr.u32 i, {nibbles}, 1;
        lop3.b32 i, i, 0x4444, 0x3210, 0xEA;
        prmt.b32 {found}, x, y, i;"""
        for nibbles, found in (("$4", "u"), ("w", "v"))
    )
    return f"""{{
        .reg .b32 t0, t1, t2, t3, i, x, y, u, v, w, m, o, p, q;
        mov.b32 t0, 0x{words[0]:08X};
        mov.b32 t1, 0x{words[1]:08X};
        mov.b32 t2, 0x{words[2]:08X};
        mov.b32 t3, 0x{words[3]:08X};
        shr.u32 w, $4, 16;{look_up}
        mov.b32 m, 0x64646464;
        mov.b32 o, {pair(plus_1024(128))};
        prmt.b32 p, u, m, {BYTES_0_2};
        prmt.b32 q, u, m, {BYTES_1_3};
        sub.f16x2 $0, p, o;
        sub.f16x2 $2, q, o;
        prmt.b32 p, v, m, {BYTES_0_2};
        prmt.b32 q, v, m, {BYTES_1_3};
        sub.f16x2 $1, p, o;
        sub.f16x2 $3, q, o;
    }}"""


@triton.constexpr_function
def signed_bytes_ptx():
    """$2: four signed bytes -> $0, $1."""
    return f"""{{
        .reg .b32 x, a, b, m, o;
        xor.b32 x, $2, 0x80808080;
        mov.b32 m, 0x64646464;
        prmt.b32 a, x, m, {BYTES_0_1};
        prmt.b32 b, x, m, {BYTES_2_3};
        mov.b32 o, {pair(plus_1024(128))};
        sub.f16x2 $0, a, o;
        sub.f16x2 $1, b, o;
    }}"""


@triton.constexpr_function
def digits_ptx():
    """$10: four bytes -> $0 and $1, $2 and $3, ...: five digits in base 3 of each / 256, less 1.

    Three times a byte, as 16 bits, is a digit above 8 bits of rest. There it is fp16's
    1024 + 256 n: times 1/256, less 5.
    """
    digits = "".join(
        f"""
        mul.lo.u32 {x}, {x}, 3;
        lop3.b32 h, {x}, 0x03000300, 0x64006400, 0xEA;
        fma.rn.f16x2 ${2 * i + j}, h, s, p;
        and.b32 {x}, {x}, 0x00FF00FF;"""
        for i in range(5)
        for j, x in enumerate("ab")
    )
    return f"""{{
        .reg .b32 a, b, h, s, p;
        prmt.b32 a, $10, 0, {BYTES_0_1};
        prmt.b32 b, $10, 0, {BYTES_2_3};
        mov.b32 s, 0x1C001C00;
        mov.b32 p, 0xC500C500;{digits}
    }}"""


@triton.constexpr_function
def signed_points_ptx(first, n):
    """`n` bytes, 4 or 8, and a word of signs, `n` times the same -> pairs of fp16.

    A word of four bytes becomes two pairs. Bits `first` + i and `first` + i + 16 of the word are
    the signs of pair i; with 0x78 `lop3` is `a ^ (b & c)`.
    """
    n_words = n // 4
    signs = f"${3 * n_words}"
    pairs = "".join(
        f"""
        prmt.b32 a, ${2 * n_words + i // 2}, m, {(BYTES_0_1, BYTES_2_3)[i % 2]};
        sub.f16x2 a, a, o;
        shl.b32 s, {signs}, {15 - first - i};
        lop3.b32 ${i}, a, s, 0x80008000, 0x78;"""
        for i in range(2 * n_words)
    )
    return f"""{{
        .reg .b32 a, s, m, o;
        mov.b32 m, 0x64646464;
        mov.b32 o, {pair(0x6400)};{pairs}
    }}"""


@triton.constexpr_function
def shifted_points_ptx():
    """$2: four bytes; $3 (and $4 to $6, the same): twice 1024 + n in fp16 -> $0, $1, less n."""
    return f"""{{
        .reg .b32 a, b, m;
        mov.b32 m, 0x64646464;
        prmt.b32 a, $2, m, {BYTES_0_1};
        prmt.b32 b, $2, m, {BYTES_2_3};
        sub.f16x2 $0, a, $3;
        sub.f16x2 $1, b, $3;
    }}"""


@triton.constexpr_function
def bit_field_ptx(shift, n_bits, above_shift, above_bits, offset):
    """$2, $3: four bytes each -> $0, $1: as `bit_fields.unpack_bit_field` says."""
    low = ((1 << n_bits) - 1) * 0x01010101
    high = (((1 << above_bits) - 1) << n_bits) * 0x01010101
    to_left = n_bits - above_shift
    move = f"shl.b32 h, $3, {to_left};" if to_left >= 0 else f"shr.u32 h, $3, {-to_left};"
    join = f"{move} and.b32 h, h, 0x{high:08X}; or.b32 a, a, h;" if above_bits else ""
    return f"""{{
        .reg .b32 a, h, m, o;
        shr.u32 a, $2, {shift};
        and.b32 a, a, 0x{low:08X};
        {join}
        mov.b32 m, 0x64646464;
        mov.b32 o, {pair(plus_1024(offset))};
        prmt.b32 h, a, m, {BYTES_0_1};
        sub.f16x2 $0, h, o;
        prmt.b32 h, a, m, {BYTES_2_3};
        sub.f16x2 $1, h, o;
    }}"""


@triton.constexpr_function
def e4m3_ptx():
    """$2: four fp8 numbers -> $0, $1. Their bits are an fp16 number's, 2 ** 8 too small."""
    return f"""{{
        .reg .b32 a, b, c, d, s;
        prmt.b32 a, $2, 0, {ABOVE_0_1};
        prmt.b32 b, $2, 0, {ABOVE_2_3};
        and.b32 c, a, 0x7F007F00;
        and.b32 d, b, 0x7F007F00;
        shr.u32 c, c, 1;
        shr.u32 d, d, 1;
        lop3.b32 a, a, 0x80008000, c, 0xEA;
        lop3.b32 b, b, 0x80008000, d, 0xEA;
        mov.b32 s, 0x5C005C00;
        mul.f16x2 $0, a, s;
        mul.f16x2 $1, b, s;
    }}"""


@triton.constexpr_function
def e5m2_ptx():
    """$2: four fp8 numbers -> $0, $1. They are the upper halves of fp16 numbers."""
    return f"""{{
        prmt.b32 $0, $2, 0, {ABOVE_0_1};
        prmt.b32 $1, $2, 0, {ABOVE_2_3};
    }}"""


OF_HALVES = f"""
        mov.b32 m, 0x64646464;
        mov.b32 o, {pair(plus_1024(128))};"""
"""Constants of `number_pairs_ptx`."""


@triton.constexpr_function
def limited_ptx(largest, most):
    """Limit two scales, and what is missing to an outlier.

    $2 has two scales, $3 what is missing, fp16 in the lower half of a word. $0 gets the scales
    within +-`largest`. $1 gets what is missing, twice, so that with a value of at most 127 times a
    scale it stays within `most`.
    """
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
"""Bits of a place that say which eight."""


@triton.constexpr_function
def outlier_ptx():
    """Tell where an outlier is.

    $5 has what is missing to it, fp16 twice, and $6 a place above 16 other bits. $0 to $3 get the
    number where the place is a pair's in its group of eight, 0 elsewhere. $4 gets which group it
    is, as 1024 and the bits of `OF_GROUP`, fp16 twice.
    """
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
    """Make a table of four values, and of the outliers that each would be.

    $4 has a scale, fp16 in the lower half of a word, and $5 what is missing to an outlier, twice.
    $6 and $7 have four numbers as pairs of fp16. $0 gets the lower bytes of their values and $1 the
    upper ones, $2 and $3 the outliers'.
    """
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
    """Make a table of eight values.

    $4 has a scale, fp16 in the lower half of a word, and from $5 on there are eight numbers as
    pairs of fp16. $0 and $1 get the lower bytes of the first and of the last four values, $2 and $3
    the upper ones.
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
    """Look up the values of codes of two bits.

    $8 has four bytes of four codes each. From $9 on there are, four times each, the tables of
    `four_values_ptx` and where an outlier is, of 16 nibbles, twice 8, times 4. $0 and $1, ... get
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
    """Look up the values of codes of three bits.

    $8 has four bytes of four codes each. From $9 on there are, four times each, third bits as
    `low_bits.unpack_three_bits` has them, and the tables of `eight_values_ptx`. Then come, four
    times each, the results of `outlier_ptx`, and what the last of these is for an outlier among the
    first or second codes. $0 and $1, ... get the values of the codes, from the lowest bits on.
    """
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
    """The entries of a word's eight codes as bytes: the lower half's in `u`, the upper's in `v`.

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
    """Two entries as values: an entry n below the byte 0x58 is 128 + n / 8; a scale and
    `c` make of it twice n - 64 times the scale, over 16."""
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
    """Look up the values of codes of four bits.

    $16 to $19 have sixteen bytes of nibbles. The rest comes sixteen times each: from $20 on four
    words of a table of 16 bytes below 128, then bytes 0x58 ($84) and two scales ($100). Then come
    an outlier's fp16 and above it its place among 64 ($116), and the selector of the outlier and
    the scale ($132). Last comes a bit that the place turns to where the outlier is, from the first
    byte on ($148). $0 to $7 get the values of the low nibbles over 16, as pairs of fp16, and $8 to
    $15 of the high ones.

    They are over 16, so that 136 times a scale is finite. Scales stay within 256, and what is
    missing within 32768, half of fp16's range each. `o` is 1/16 for the half of a pair that the
    outlier is, and 0 for the other one; `k` has a bit for each result.
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
