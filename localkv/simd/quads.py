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

from llvmlite import ir
from numba.core import types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from localkv.simd.dots import dot_of_bytes
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES
from localkv.simd.vector import (
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
"""Words of a digit of a block and of a row; the start and the scale follow those of both."""


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

    Those of 16 low nibbles are the 16-bit item `mask_index` of `bits`, those of the 16 high ones
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
    """The sums of `dot_digits` for `n` blocks or rows of digits of so many words, at word
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

    The bits of 16 low codes are the 16-bit item `index` of `bits`, those of the 16 high ones the
    next item, and so on for 4 rows, as for `quads.load_quads_of_five_bits`; but codes come
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
"""The same of bytes from 0 to 63; needs VBMI."""
