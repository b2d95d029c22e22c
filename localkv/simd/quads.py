"""Four bytes a lane: codes of 4 channels of 16 tokens, and their products with digits.

A *digit block* is 32 floats as integers of 24 bits times a scale. It takes the floats' 32 words: 8
are the highest signed digits of base 256, four a word; then come 8 of the next and 8 of the lowest
digits; two integers that the latter's sums start with; the scale, a float; and five unused words.

    word    0 .. 7          8 .. 15       16 .. 23      24, 25    26       27 .. 31
            high digits,    middle        low           starts    scale    unused
            4 channels a
            word

An integer n of 24 bits is 65536 high + 256 middle + low with signed digits, from -128 to 127. The
dot product of 32 codes (unsigned bytes, from 0 to 255) with 32 such integers then is

    sum code n = 256 (256 sum code high + sum code middle) + sum code low

whose three sums `vpdpbusd` makes, exactly: each is at most 32 * 255 * 128 < 2^20 in magnitude. What
is in brackets stays below 2^28 + 2^20, within 32 bits also with what it starts with. Only then do
it and the last sum become floats, which one fused operation joins (`add_digits`): two roundings, of
at most 2^-24 each.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba.core import types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from localkv.simd.byte_dots import dot_of_bytes
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
    multiply_add,
    pointer,
    splat,
)
from localkv.simd.vector_tuple import literal_length

QUAD = 4
BYTES = QUAD * LANES
DIGITS = 3
DIGIT_WORDS = 8
STARTS = DIGITS * DIGIT_WORDS
SCALE = STARTS + 2


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
    typing: Typing, base: Kind, index: Kind, stride: Kind, n: Kind, n_groups: Kind
) -> Intrinsic:
    """The sums of `dot_digits` for `n` digit blocks, at word index + i * stride, and groups."""
    check_base(base)
    rows, groups = literal_length(n), literal_length(n_groups)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        array, index, stride = args[:3]
        n_sums = DIGITS * rows * groups
        kind = ir.ArrayType(lanes_of(i32), n_sums)
        out = ir.Constant(kind, [constant(i32, 0)] * n_sums)
        for i in range(rows):
            for digit in range(1, DIGITS):
                at = _offset(builder, index, STARTS + digit - 1)
                where = pointer(context, builder, signature.args[0], array, at, i32)
                start = splat(builder, builder.load(where, align=1))
                for g in range(groups):
                    out = builder.insert_value(out, start, (digit * rows + i) * groups + g)
            index = builder.add(index, stride)
        return out

    result = UniTuple(I32x16, DIGITS * rows * groups)
    return result(base, types.intp, types.intp, n, n_groups), generate


@intrinsic
def dot_digits(
    typing: Typing, sums: Kind, quads: Kind, base: Kind, index: Kind, stride: Kind
) -> Intrinsic:
    """Add the products of one word's channels, `index` words into digit blocks.

    sums[(digit * n + i) * groups + g] += quads[g] . the word at index + i * stride, and so on for
    the lower digits; `quads` are unsigned bytes of each group.
    """
    check_base(base)
    groups = quads.count
    n = sums.count // (DIGITS * groups)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, codes, array, index, stride = args
        for i in range(n):
            for digit in range(DIGITS):
                at = _offset(builder, index, digit * DIGIT_WORDS)
                where = pointer(context, builder, signature.args[2], array, at, i32)
                word = splat(builder, builder.load(where, align=1))
                for g in range(groups):
                    place = (digit * n + i) * groups + g
                    old = builder.extract_value(out, place)
                    code = builder.extract_value(codes, g)
                    out = builder.insert_value(out, dot_of_bytes(builder, old, code, word), place)
            index = builder.add(index, stride)
        return out

    return sums(sums, quads, base, types.intp, types.intp), generate


@intrinsic
def add_digits(
    typing: Typing, total: Kind, sums: Kind, scales: Kind, base: Kind, index: Kind, stride: Kind
) -> Intrinsic:
    """total[g * n + i] += the sums of digits * scales[g] * the scale of a digit block."""
    check_base(base)
    groups = scales.count
    n = sums.count // (DIGITS * groups)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, values, factors, array, index, stride = args
        for i in range(n):
            where = pointer(
                context, builder, signature.args[3], array, _offset(builder, index, SCALE), f32
            )
            scale = splat(builder, builder.load(where, align=1))
            for g in range(groups):
                high, middle, low = (
                    builder.extract_value(values, (digit * n + i) * groups + g)
                    for digit in range(DIGITS)
                )
                high = builder.add(builder.shl(high, constant(i32, 8)), middle)
                high, low = (builder.sitofp(x, lanes_of(f32)) for x in (high, low))
                x = multiply_add(builder, high, constant(f32, 256.0), low)
                x = builder.fmul(x, scale)
                old = builder.extract_value(out, g * n + i)
                x = multiply_add(builder, x, builder.extract_value(factors, g), old)
                out = builder.insert_value(out, x, g * n + i)
            index = builder.add(index, stride)
        return out

    return total(total, sums, scales, base, types.intp, types.intp), generate
