"""Four bytes a lane: codes of 4 channels of 16 tokens, or of 4 tokens of 16 channels, and their
products with digits.

What codes are multiplied with are floats as integers n of 16 bits times a scale:
n = 256 high + low with signed digits, from -128 to 127. The sum of products with codes (unsigned
bytes, from 0 to 255) then is

    sum code n = 256 sum code high + sum code low

whose two sums `vpdpbusd` makes, exactly. Codes may be `offset` larger than what they stand for, so
offset * sum n has to be taken off: the sum of the lower products starts with minus that. All is
kept modulo 2^32, so it is exact as long as |sum (code - offset) n| < 2^31: with codes of at most
128 and |n| < 2^15 for 511 terms. One conversion rounds it to a float, by 2^-24 at most.

A *digit block* is 32 floats on the side of K. It takes the floats' 32 words: 8 are the higher
digits, four a word; then come 8 of the lower ones; what the sums start with, an integer; the scale,
a float; and unused words.

    word    0 .. 7          8 .. 15       16       17       18 .. 31
            high digits,    low digits    start    scale    unused
            4 channels a
            word

A *digit row* is 256 floats on the side of V, the weights of a page's tokens. It takes their 256
words.

    word    0 .. 63         64 .. 127     128      129      130 .. 255
            high digits,    low digits    start    scale    unused
            4 tokens a
            word

Codes may also have a plane of single bits beside them, or be looked up in a table that is read when
the kernel runs. Kernels that read codes as bytes are for AVX-512 only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from localkv.simd import LANES
from localkv.simd.arithmetic import (
    folded_sum,
    integer_sum,
    larger_magnitude,
    largest_lane,
    nearest_integers,
)
from localkv.simd.integer import dot_of_bytes
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.vector import (
    F32x16,
    I32x16,
    call,
    check_base,
    constant,
    f32,
    i1,
    i8,
    i16,
    i32,
    lanes_of,
    lanewise,
    literal_length,
    multiply_add,
    pointer,
    splat,
)

QUAD = 4
BYTES = QUAD * LANES
DIGITS = 2
BLOCK_DIGITS, ROW_DIGITS = 8, 64
"""Words of a digit of a block and of a row; the start and the scale follow both digits'."""


def _bytes_of(value: int) -> ir.Constant:
    return ir.Constant(lanes_of(i8, BYTES), [value] * BYTES)


def _transposed(builder: Builder, x: Value, y: Value, rows: Sequence[int]) -> Value:
    """Byte i of lane t is byte t of row rows[i], of rows of 16 bytes: 0 to 3 of x, 4 to 7 of y."""
    items = [row * LANES + lane for lane in range(LANES) for row in rows]
    mixed = builder.shuffle_vector(x, y, ir.Constant(lanes_of(i32, BYTES), items))
    return builder.bitcast(mixed, I32x16.llvm)


def _load_bytes(context: Target, builder: Builder, kind: Kind, base: Value, index: Value) -> Value:
    where = pointer(context, builder, kind, base, index, i8)
    return builder.load(builder.bitcast(where, lanes_of(i8, BYTES).as_pointer()), align=1)


@intrinsic
def load_quads(typing: Typing, base: Kind, index: Kind) -> Intrinsic:
    """64 bytes at byte `index`, 4 rows of 16, transposed: byte i of lane t is byte t of row i."""
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        x = _load_bytes(context, builder, signature.args[0], *args)
        return _transposed(builder, x, x, range(QUAD))

    return I32x16(base, types.intp), generate


@intrinsic
def load_two_quads(typing: Typing, base: Kind, index: Kind) -> Intrinsic:
    """128 bytes at byte `index`: `load_quads` of the even rows of 16, and of the odd ones."""
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        base, index = args
        kind = signature.args[0]
        x = _load_bytes(context, builder, kind, base, index)
        index = builder.add(index, ir.Constant(index.type, BYTES))
        y = _load_bytes(context, builder, kind, base, index)
        both = [_transposed(builder, x, y, range(first, 2 * QUAD, 2)) for first in (0, 1)]
        return context.make_tuple(builder, signature.return_type, both)

    return UniTuple(I32x16, 2)(base, types.intp), generate


@intrinsic
def load_quads_of_five_bits(
    typing: Typing, base: Kind, index: Kind, bits: Kind, mask_index: Kind
) -> Intrinsic:
    """`load_quads` of low and of high nibbles, with a fifth bit each.

    The fifth bits of 16 low nibbles are the 16-bit item `mask_index` of `bits`, the 16 high ones'
    the next item, and so on for 4 rows.
    """
    check_base(base)
    check_base(bits)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        x = _load_bytes(context, builder, signature.args[0], *args[:2])
        where = pointer(context, builder, signature.args[2], args[2], args[3], i16)
        masks = builder.load(builder.bitcast(where, lanes_of(i16, 8).as_pointer()), align=1)
        both = []
        for first, shift in ((0, 0), (1, 4)):
            order = ir.Constant(lanes_of(i32, QUAD), list(range(first, 8, 2)))
            mask = builder.shuffle_vector(masks, masks, order)
            mask = builder.bitcast(mask, lanes_of(i1, BYTES))
            nibbles = builder.lshr(x, _bytes_of(shift)) if shift else x
            nibbles = builder.and_(nibbles, _bytes_of(15))
            codes = builder.or_(nibbles, builder.select(mask, _bytes_of(16), _bytes_of(0)))
            both.append(_transposed(builder, codes, codes, range(QUAD)))
        return context.make_tuple(builder, signature.return_type, both)

    return UniTuple(I32x16, 2)(base, types.intp, bits, types.intp), generate


@intrinsic
def load_quads_of_nibbles(typing: Typing, base: Kind, index: Kind) -> Intrinsic:
    """32 bytes at byte `index`, 4 rows of 16 nibbles, transposed: byte i of lane t is nibble t of
    row i. A row's first 8 nibbles are the low ones of its bytes, as `memory.load_nibbles` has them.
    """
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        where = pointer(context, builder, signature.args[0], args[0], args[1], i8)
        half = LANES // 2
        rows = builder.bitcast(where, lanes_of(i8, QUAD * half).as_pointer())
        packed = builder.load(rows, align=1)
        items = [row * half + lane % half for lane in range(LANES) for row in range(QUAD)]
        mixed = builder.shuffle_vector(packed, packed, ir.Constant(lanes_of(i32, BYTES), items))
        shifts = ir.Constant(lanes_of(i32), [0] * half + [4] * half)
        words = builder.lshr(builder.bitcast(mixed, I32x16.llvm), shifts)
        return builder.and_(words, constant(i32, 0x0F0F0F0F))

    return I32x16(base, types.intp), generate


@intrinsic
def quad_from_table(typing: Typing, codes: Kind, table: Kind) -> Intrinsic:
    """table[code] of each byte, 0 to 15; `table` is a tuple of 16 bytes. AVX-512 only."""

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        entries = [builder.trunc(builder.extract_value(args[1], i), i8) for i in range(LANES)]
        vector = ir.Constant(lanes_of(i8, BYTES), ir.Undefined)
        for i in range(BYTES):
            vector = builder.insert_element(vector, entries[i % LANES], ir.Constant(i32, i))
        index = builder.bitcast(args[0], lanes_of(i8, BYTES))
        values = call(builder, "llvm.x86.avx512.pshuf.b.512", lanes_of(i8, BYTES), [vector, index])
        return builder.bitcast(values, I32x16.llvm)

    return I32x16(I32x16, table), generate


def _offset(builder: Builder, index: Value, n: int) -> Value:
    return builder.add(index, ir.Constant(index.type, n))


@intrinsic(prefer_literal=True)
def start_digits(
    typing: Typing, base: Kind, index: Kind, stride: Kind, words: Kind, n: Kind, n_groups: Kind
) -> Intrinsic:
    """The sums of `dot_digits` for `n` blocks or rows of digits, each of some words, at word
    index + i * stride, and groups."""
    check_base(base)
    rows, groups, n_words = (literal_length(x) for x in (n, n_groups, words))

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        array, index, stride = args[:3]
        n_sums = DIGITS * rows * groups
        kind = ir.ArrayType(lanes_of(i32), n_sums)
        out = ir.Constant(kind, [constant(i32, 0)] * n_sums)
        for i in range(rows):
            at = _offset(builder, index, DIGITS * n_words)
            where = pointer(context, builder, signature.args[0], array, at, i32)
            start = splat(builder, builder.load(where, align=1))
            for g in range(groups):
                out = builder.insert_value(out, start, (rows + i) * groups + g)
            index = builder.add(index, stride)
        return out

    result = UniTuple(I32x16, DIGITS * rows * groups)
    return result(base, types.intp, types.intp, words, n, n_groups), generate


@intrinsic(prefer_literal=True)
def dot_digits(
    typing: Typing, sums: Kind, quads: Kind, base: Kind, index: Kind, stride: Kind, words: Kind
) -> Intrinsic:
    """Add the products of one word's channels or tokens, `index` words into the first's digits.

    sums[(digit * n + i) * groups + g] += quads[g] . the word at index + i * stride, and so on for
    the lower digits, `words` further; `quads` are unsigned bytes of each group.
    """
    check_base(base)
    n_words = literal_length(words)
    groups = quads.count
    n = sums.count // (DIGITS * groups)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, codes, array, index, stride, _ = args
        # no instruction: words loaded long before they are used would push sums out of registers
        builder.fence("acquire", "singlethread")
        for i in range(n):
            for digit in range(DIGITS):
                at = _offset(builder, index, digit * n_words)
                where = pointer(context, builder, signature.args[2], array, at, i32)
                word = splat(builder, builder.load(where, align=1))
                for g in range(groups):
                    place = (digit * n + i) * groups + g
                    old = builder.extract_value(out, place)
                    code = builder.extract_value(codes, g)
                    out = builder.insert_value(out, dot_of_bytes(builder, old, code, word), place)
            index = builder.add(index, stride)
        return out

    return sums(sums, quads, base, types.intp, types.intp, words), generate


@intrinsic(prefer_literal=True)
def add_digits(
    typing: Typing,
    total: Kind,
    sums: Kind,
    scales: Kind,
    base: Kind,
    index: Kind,
    stride: Kind,
    words: Kind,
) -> Intrinsic:
    """total[g * n + i] += the sums of digits * scales[g] * the scale of a block or row."""
    check_base(base)
    groups, n_words = scales.count, literal_length(words)
    n = sums.count // (DIGITS * groups)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, values, factors, array, index, stride, _ = args
        for i in range(n):
            at = _offset(builder, index, DIGITS * n_words + 1)
            where = pointer(context, builder, signature.args[3], array, at, f32)
            scale = splat(builder, builder.load(where, align=1))
            for g in range(groups):
                high, low = (
                    builder.extract_value(values, (digit * n + i) * groups + g)
                    for digit in range(DIGITS)
                )
                x = builder.add(builder.shl(high, constant(i32, 8)), low)
                x = builder.fmul(builder.sitofp(x, lanes_of(f32)), scale)
                old = builder.extract_value(out, g * n + i)
                x = multiply_add(builder, x, builder.extract_value(factors, g), old)
                out = builder.insert_value(out, x, g * n + i)
            index = builder.add(index, stride)
        return out

    return total(total, sums, scales, base, types.intp, types.intp, words), generate


MASK_BYTES = 2 * LANES * QUAD // 8


@intrinsic(prefer_literal=True)
def or_bits(typing: Typing, codes: Kind, bits: Kind, index: Kind, value: Kind) -> Intrinsic:
    """`codes`, two vectors of bytes, with `value` set in those whose bit is set.

    The bits of 16 low codes are the 16-bit item `index` of `bits`, the 16 high ones' are the next
    item, and so on for 4 rows, as for `quads.load_quads_of_five_bits`; but codes come
    transposed: byte i of lane t is byte t of row i.
    """
    check_base(bits)
    set_to = value.literal_value

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        where = pointer(context, builder, signature.args[1], args[1], args[2], i16)
        kind = lanes_of(i8, MASK_BYTES)
        masks = builder.load(builder.bitcast(where, kind.as_pointer()), align=1)
        places = [(lane, row) for lane in range(LANES) for row in range(QUAD)]
        one = ir.Constant(lanes_of(i8, BYTES), [1 << lane % 8 for lane, _ in places])
        zero = ir.Constant(lanes_of(i8, BYTES), [0] * BYTES)
        many = ir.Constant(lanes_of(i8, BYTES), [set_to] * BYTES)
        both = []
        for half in range(2):
            items = [(2 * row + half) * 2 + lane // 8 for lane, row in places]
            order = ir.Constant(lanes_of(i32, BYTES), items)
            spread = builder.shuffle_vector(masks, masks, order)
            is_set = builder.icmp_unsigned("!=", builder.and_(spread, one), zero)
            code = builder.bitcast(builder.extract_value(args[0], half), lanes_of(i8, BYTES))
            code = builder.or_(code, builder.select(is_set, many, zero))
            both.append(builder.bitcast(code, I32x16.llvm))
        return context.make_tuple(builder, signature.return_type, both)

    return codes(codes, bits, types.intp, value), generate


def _numbers(
    context: Target, builder: Builder, signature: Signature, args: Args, offset: int
) -> Value:
    """The 16 floats at a base, `offset` larger, as bytes."""
    start = ir.Constant(context.get_value_type(types.intp), 0)
    where = pointer(context, builder, signature.args[0], args[0], start, f32, LANES)
    floats = builder.load(where, align=4)
    whole = builder.fptosi(floats, lanes_of(i32))
    return builder.trunc(builder.add(whole, constant(i32, offset)), lanes_of(i8))


def _table(builder: Builder, numbers: Value, order: Sequence[int]) -> Value:
    """Numbers in an order, as often as a vector has room for them."""
    mask = ir.Constant(lanes_of(i32, BYTES), list(order) * (BYTES // len(order)))
    return builder.bitcast(builder.shuffle_vector(numbers, numbers, mask), I32x16.llvm)


@intrinsic(prefer_literal=True)
def byte_table(typing: Typing, base: Kind, offset: Kind) -> Intrinsic:
    """The 16 integers that are floats at `base`, `offset` larger: for `look_up_quad`."""
    check_base(base)
    n = offset.literal_value

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        numbers = _numbers(context, builder, signature, args, n)
        return _table(builder, numbers, range(LANES))

    return I32x16(base, offset), generate


@intrinsic(prefer_literal=True)
def pair_tables(typing: Typing, base: Kind, offset: Kind, codes: Kind) -> Intrinsic:
    """Tables for nibbles that are two bits of two codes, of the lower codes and of the higher.

    Of 8 `codes` they have 32 entries, for `look_up_of_64`: bit 4 is the code's third bit.
    """
    check_base(base)
    n, n_codes = offset.literal_value, codes.literal_value

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        numbers = _numbers(context, builder, signature, args, n)
        indices = range(LANES * n_codes // 4)
        both = [
            _table(builder, numbers, [i % LANES >> shift & 3 | i // LANES << 2 for i in indices])
            for shift in (0, 2)
        ]
        return context.make_tuple(builder, signature.return_type, both)

    return UniTuple(I32x16, 2)(base, offset, codes), generate


def _looked_up(name: str) -> Callable[[Builder, Value, Value], Value]:
    def look_up(builder: Builder, codes: Value, table: Value) -> Value:
        kind = lanes_of(i8, BYTES)
        both = [builder.bitcast(x, kind) for x in (table, codes)]
        return builder.bitcast(call(builder, name, kind, both), I32x16.llvm)

    return look_up


look_up_quad = lanewise(_looked_up("llvm.x86.avx512.pshuf.b.512"), [I32x16, I32x16], I32x16)
"""table[code] of each byte, 0 to 15."""
look_up_of_64 = lanewise(_looked_up("llvm.x86.avx512.permvar.qi.512"), [I32x16, I32x16], I32x16)
"""Look up bytes from 0 to 63; needs VBMI."""


def _row(context: Target, builder: Builder, kind: Kind, base: Value, index: Value) -> Value:
    where = pointer(context, builder, kind, base, index, f32, LANES)
    return builder.load(where, align=1)


@intrinsic
def larger_products(
    typing: Typing, largest: Kind, base: Kind, index: Kind, stride: Kind, v: Kind
) -> Intrinsic:
    """The larger of |x v| and largest[i] of each row's 16 floats x; NaN of NaN."""
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, array, index, stride, v = args
        for i in range(largest.count):
            x = builder.fmul(_row(context, builder, base, array, index), v)
            x = larger_magnitude(builder, x, builder.extract_value(out, i))
            out = builder.insert_value(out, x, i)
            index = builder.add(index, stride)
        return out

    return largest(largest, base, types.intp, types.intp, F32x16), generate


def _putting(reduced: Callable[[Builder, Value], Value], item: Any) -> Any:
    @intrinsic
    def put(typing: Typing, base: Kind, index: Kind, stride: Kind, x: Kind) -> Intrinsic:
        check_base(base)

        def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
            array, index, stride, vectors = args
            for i in range(x.count):
                value = reduced(builder, builder.extract_value(vectors, i))
                where = pointer(context, builder, base, array, index, item)
                builder.store(value, where, align=1)
                index = builder.add(index, stride)
            return context.get_dummy_value()

        return types.void(base, types.intp, types.intp, x), generate

    return put


put_largest = _putting(largest_lane, f32)
"""The word at index + i * stride = the largest lane of x[i], of floats that are not negative; NaN
of NaN."""
put_sums = _putting(integer_sum, i32)
"""Put the sums of the lanes of integers."""
put_float_sums = _putting(folded_sum, f32)
"""Put the sums of the lanes of floats."""


@intrinsic(prefer_literal=True)
def zeros_i32(typing: Typing, n: Kind) -> Intrinsic:
    length = literal_length(n)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        kind = ir.ArrayType(lanes_of(i32), length)
        return ir.Constant(kind, [constant(i32, 0)] * length)

    return UniTuple(I32x16, length)(n), generate


def _store_digits(
    context: Target, builder: Builder, kind: Kind, base: Value, index: Value, n: list[Any]
) -> None:
    """The digits of 64 integers, four vectors of them, at word `index` of a digit row."""
    # with 128 added to the lower digit, that one and the higher one are the bytes of 16 bits
    halves = []
    for i in (0, 2):
        first, second = (builder.add(x, constant(i32, 128)) for x in n[i : i + 2])
        second = builder.shl(second, constant(i32, 16))
        first = builder.and_(first, constant(i32, 0xFFFF))
        halves.append(builder.bitcast(builder.or_(first, second), lanes_of(i8, BYTES)))
    for digit in range(DIGITS):
        # of a half, token t < 16 is in the lower two bytes of word t, 16 + t in the upper two
        places = [
            half * BYTES + t % LANES * 4 + t // LANES * 2 + 1 - digit
            for half in range(2)
            for t in range(2 * LANES)
        ]
        order = ir.Constant(lanes_of(i32, BYTES), places)
        out = builder.shuffle_vector(*halves, order)
        if digit:
            out = builder.xor(out, ir.Constant(lanes_of(i8, BYTES), [128] * BYTES))
        at = builder.add(index, ir.Constant(index.type, digit * ROW_DIGITS))
        where = pointer(context, builder, kind, base, at, i32, LANES)
        builder.store(builder.bitcast(out, I32x16.llvm), where, align=1)


@intrinsic
def split_rows(
    typing: Typing,
    sums: Kind,
    base: Kind,
    index: Kind,
    stride: Kind,
    vectors: Kind,
    digits: Kind,
    word: Kind,
    factor: Kind,
) -> Intrinsic:
    """Store the digits of n = round(x v factor), of 64 floats x of each row and four vectors v; add
    those integers to sums[i].

    Digits are stored from `word` on, of rows as far from each other as the others. There is the
    factor of each row, too: the float at word `factor`.
    """
    check_base(base)
    check_base(digits)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, array, index, stride, vectors, goal, word, place = args
        for i in range(sums.count):
            where = pointer(context, builder, digits, goal, place, f32)
            factor = splat(builder, builder.load(where, align=1))
            n = []
            for j in range(QUAD):
                at = builder.add(index, ir.Constant(index.type, LANES * j))
                x = _row(context, builder, base, array, at)
                x = builder.fmul(builder.fmul(x, builder.extract_value(vectors, j)), factor)
                n.append(nearest_integers(builder, x))
            _store_digits(context, builder, digits, goal, word, n)
            total = builder.add(builder.add(n[0], n[1]), builder.add(n[2], n[3]))
            total = builder.add(builder.extract_value(out, i), total)
            out = builder.insert_value(out, total, i)
            index, word, place = (builder.add(x, stride) for x in (index, word, place))
        return out

    given = (base, types.intp, types.intp, vectors, digits, types.intp, types.intp)
    return sums(sums, *given), generate


def _store_short_digits(
    context: Target,
    builder: Builder,
    kind: Kind,
    base: Value,
    index: Value,
    n: list[Any],
    words: int,
) -> None:
    """The digits of 32 integers, two vectors of them to which 128 was added, at word `index`."""
    second = builder.shl(n[1], constant(i32, 16))
    both = builder.or_(builder.and_(n[0], constant(i32, 0xFFFF)), second)
    data, half = builder.bitcast(both, lanes_of(i8, BYTES)), BYTES // 2
    for digit in range(DIGITS):
        # item i < 16 is in the lower two bytes of word i, 16 + i in the upper two
        places = [i % LANES * 4 + i // LANES * 2 + 1 - digit for i in range(half)]
        out = builder.shuffle_vector(data, data, ir.Constant(lanes_of(i32, half), places))
        if digit:
            out = builder.xor(out, ir.Constant(lanes_of(i8, half), [128] * half))
        at = builder.add(index, ir.Constant(index.type, digit * words))
        where = pointer(context, builder, kind, base, at, i32)
        where = builder.bitcast(where, lanes_of(i8, half).as_pointer())
        builder.store(out, where, align=1)


@intrinsic(prefer_literal=True)
def split_products(
    typing: Typing,
    sums: Kind,
    base: Kind,
    index: Kind,
    stride: Kind,
    vectors: Kind,
    digits: Kind,
    word: Kind,
    digit_stride: Kind,
    words: Kind,
    factor: Kind,
) -> Intrinsic:
    """Store the digits of n = round(x v factor), of 32 floats x of each row and two vectors v; add
    those integers to sums[i].

    Args:
        index, stride: where the floats are; row i's begin at index + i * stride.
        word, digit_stride: the same of digits, in words; the lower ones are `words` further.
        factor: where the first row's factor is, a float among the digits; the others' are as far
            from it as digits are.
    """
    check_base(base)
    check_base(digits)
    distance = literal_length(words)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, array, index, stride, vectors, goal, word, digit_stride, _, place = args
        for i in range(sums.count):
            where = pointer(context, builder, digits, goal, place, f32)
            times = splat(builder, builder.load(where, align=1))
            n, total = [], builder.extract_value(out, i)
            for j in range(2):
                at = builder.add(index, ir.Constant(index.type, LANES * j))
                x = _row(context, builder, base, array, at)
                x = builder.fmul(builder.fmul(x, builder.extract_value(vectors, j)), times)
                x = nearest_integers(builder, x)
                total = builder.add(total, x)
                n.append(builder.add(x, constant(i32, 128)))
            _store_short_digits(context, builder, digits, goal, word, n, distance)
            out = builder.insert_value(out, total, i)
            index = builder.add(index, stride)
            word, place = (builder.add(x, digit_stride) for x in (word, place))
        return out

    integer = types.intp
    given = (base, integer, integer, vectors, digits, integer, integer, words, integer)
    return sums(sums, *given), generate
