"""Integer vectors: nibbles, a table of 16 bytes, dot products with what each CPU has for them.

Four products of bytes are added to each lane of 4 bytes. Which factors an instruction takes depends
on the CPU:

    AVX512-VNNI, AVX-VNNI   vpdpbusd               unsigned . signed
    NEON i8mm               usdot, sdot            unsigned . signed, signed . signed
    NEON dotprod            sdot                   signed . signed
    AVX2                    vpmaddubsw, vpmaddwd   unsigned . signed, if sums of two fit 16 bits

Two products of bfloats are added to each lane of a float. AVX512-BF16 has an instruction for that,
which takes and gives numbers below 2^-126 as 0: half as many instructions, and half as many bytes
of activations, as products of floats take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.types import Literal
from numba.core.types.containers import BaseTuple, UniTuple
from numba.extending import intrinsic

from localkv.simd import LANES
from localkv.simd.cpu_features import (
    FEATURES,
    HAS_AVX2,
    HAS_AVX512,
    HAS_BFLOAT_DOTS,
    HAS_DOTPROD,
    HAS_I8MM,
    HAS_VNNI,
    IS_ARM64,
    IS_X86,
    REGISTER_BYTES,
)
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.shuffle import joined
from localkv.simd.vector import (
    F32x16,
    I32x16,
    call,
    check_base,
    constant,
    f32,
    i8,
    i16,
    i32,
    lanes_of,
    lanewise,
    multiply_add,
    pointer,
)

VECTOR_BYTES = 4 * LANES


def as_bytes(builder: Builder, x: Value) -> Value:
    """A vector's bytes, from the first lane's lowest one on."""
    n = x.type.count * x.type.element.width // 8
    return builder.bitcast(x, lanes_of(i8, n))


def as_words(builder: Builder, x: Value) -> Value:
    """A vector of bytes as words of 4."""
    n = x.type.count * x.type.element.width // 32
    return builder.bitcast(x, lanes_of(i32, n))


def by_register(builder: Builder, instruction: Callable[..., Any], *vectors: Value) -> Value:
    """A vector of words that an instruction makes of such vectors, a register at a time."""
    n = REGISTER_BYTES // 4
    if n == LANES:
        return instruction(*vectors)
    parts = []
    for start in range(0, LANES, n):
        order = ir.Constant(lanes_of(i32, n), list(range(start, start + n)))
        parts.append(instruction(*(builder.shuffle_vector(x, x, order) for x in vectors)))
    return joined(builder, parts)


MOST_SIGNED = 127
"""The largest unsigned byte that is the same as a signed one."""

_WORDS, _PAIRS = lanes_of(i32, REGISTER_BYTES // 4), lanes_of(i16, REGISTER_BYTES // 2)
_MULTIPLY_BYTES, _MULTIPLY_PAIRS = (
    ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512")
    if HAS_AVX512
    else ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")
)


def _one_instruction(name: str) -> Callable[..., Any]:
    """It takes the totals, then the bytes."""

    def dot(builder: Builder, *vectors: Value) -> Any:
        def instruction(total: Value, x: Value, y: Value) -> Any:
            factors = as_bytes(builder, x), as_bytes(builder, y)
            return call(builder, name, _WORDS, [total, *factors])

        return by_register(builder, instruction, *vectors)

    return dot


_vpdpbusd = _one_instruction(f"llvm.x86.avx512.vpdpbusd.{8 * REGISTER_BYTES}")
_usdot = _one_instruction("llvm.aarch64.neon.usdot.v4i32.v16i8")
_sdot = _one_instruction("llvm.aarch64.neon.sdot.v4i32.v16i8")


def _pairs_added(builder: Builder, total: Value, x: Value, y: Value) -> Value:
    """The sums of two products of 16-bit integers, in each word."""
    factors = [builder.bitcast(value, _PAIRS) for value in (x, y)]
    return builder.add(total, call(builder, _MULTIPLY_PAIRS, _WORDS, factors))


def _of_small(builder: Builder, total: Value, unsigned: Value, signed: Value) -> Any:
    """AVX2's dot products; two products together fit 16 bits, else they would be cut off."""
    factors = [as_bytes(builder, value) for value in (unsigned, signed)]
    pairs = call(builder, _MULTIPLY_BYTES, _PAIRS, factors)
    return _pairs_added(builder, total, pairs, ir.Constant(_PAIRS, [1] * _PAIRS.count))


def _of_large(builder: Builder, total: Value, unsigned: Value, signed: Value) -> Any:
    """AVX2's dot products; even bytes, then odd ones, become 16-bit integers first."""
    unsigned, signed = (builder.bitcast(value, _PAIRS) for value in (unsigned, signed))
    byte = ir.Constant(_PAIRS, [8] * _PAIRS.count)
    low = builder.and_(unsigned, ir.Constant(_PAIRS, [255] * _PAIRS.count))
    low_signed = builder.ashr(builder.shl(signed, byte), byte)
    total = _pairs_added(builder, total, low, low_signed)
    return _pairs_added(builder, total, builder.lshr(unsigned, byte), builder.ashr(signed, byte))


def _plainly(builder: Builder, total: Value, unsigned: Value, signed: Value) -> Value:
    for byte in range(4):
        low = builder.lshr(unsigned, constant(i32, 8 * byte))
        low = builder.and_(low, constant(i32, 255))
        high = builder.shl(signed, constant(i32, 24 - 8 * byte))
        high = builder.ashr(high, constant(i32, 24))
        total = builder.add(total, builder.mul(low, high))
    return total


def flipped(builder: Builder, codes: Value) -> Value:
    """Unsigned bytes less 128, as signed ones, and the other way round."""
    return builder.xor(codes, constant(i32, -0x7F7F7F80))


def dot_of_bytes(
    builder: Builder, total: Value, unsigned: Value, signed: Value, most: int = 255
) -> Value:
    """total + the dot product of 4 unsigned and 4 signed bytes, in each lane, exactly.

    Args:
        most: the largest of the unsigned bytes. Up to 127 some CPUs have it easier; signed bytes
            then are from -127 on.
    """
    if HAS_VNNI:
        return _vpdpbusd(builder, total, unsigned, signed)
    if HAS_I8MM:
        return _usdot(builder, total, unsigned, signed)
    if HAS_DOTPROD:
        if most <= MOST_SIGNED:
            return _sdot(builder, total, unsigned, signed)
        sums = _sdot(builder, constant(i32, 0), constant(i32, 0x01010101), signed)
        total = builder.add(total, builder.shl(sums, constant(i32, 7)))
        return _sdot(builder, total, flipped(builder, unsigned), signed)
    if HAS_AVX2:
        dot = _of_small if most <= MOST_SIGNED else _of_large
        return by_register(builder, lambda *x: dot(builder, *x), total, unsigned, signed)
    return _plainly(builder, total, unsigned, signed)


def dot_of_signed_bytes(builder: Builder, total: Value, x: Value, y: Value) -> Value:
    """Dot products of signed bytes, where there is `HAS_SIGNED_BYTE_DOTS`; y's are from -127."""
    if HAS_DOTPROD:
        return _sdot(builder, total, x, y)

    def instruction(total: Value, x: Value, y: Value) -> Any:
        # |x| (y sign x): the absolute value of -128 is the unsigned byte 128, and two products of
        # it and of 127 fit 16 bits
        x, y = as_bytes(builder, x), as_bytes(builder, y)
        nothing = ir.Constant(x.type, [0] * x.type.count)
        negative = builder.icmp_signed("<", x, nothing)
        size = builder.select(negative, builder.sub(nothing, x), x)
        if HAS_AVX512:
            y = builder.select(negative, builder.sub(nothing, y), y)
        else:
            y = call(builder, "llvm.x86.avx2.psign.b", x.type, [y, x])
        return _of_small(builder, total, as_words(builder, size), as_words(builder, y))

    return by_register(builder, instruction, total, x, y)


PAIRS = 2 * LANES
"""bfloats of a vector."""


class _BFloatType(ir.Type):
    """What LLVM calls it; llvmlite has no such type."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloatType)

    def __hash__(self) -> int:
        return hash(_BFloatType)


bf16 = _BFloatType()


def rounded_to_bfloats(b: Builder, x: Value) -> Value:
    """The bits of the nearest bfloats, ties to even, as <16 x i16>; NaN stays NaN."""
    bits = b.bitcast(x, lanes_of(i32))
    odd = b.and_(b.lshr(bits, constant(i32, 16)), constant(i32, 1))
    near = b.lshr(b.add(b.add(bits, constant(i32, 0x7FFF)), odd), constant(i32, 16))
    near = b.select(b.fcmp_unordered("uno", x, x), constant(i32, 0x7FC0), near)
    return b.trunc(near, lanes_of(i16))


def _halves(b: Builder, x: Value) -> tuple[Value, Value]:
    """The second bfloat of each lane and the first, as floats."""
    second = b.and_(x, constant(i32, -1 << 16))
    first = b.shl(x, constant(i32, 16))
    return b.bitcast(second, lanes_of(f32)), b.bitcast(first, lanes_of(f32))


def dot_of_bfloats(b: Builder, total: Value, x: Value, y: Value) -> Value:
    """total + the products of two bfloats in each lane, as <16 x float>.

    Args:
        x, y: <16 x i32>, two bfloats to a lane.
    """
    if HAS_BFLOAT_DOTS:
        pairs = lanes_of(bf16, PAIRS)
        factors = b.bitcast(x, pairs), b.bitcast(y, pairs)
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", lanes_of(f32), [total, *factors])
    for one, other in zip(_halves(b, x), _halves(b, y), strict=True):
        total = multiply_add(b, one, other, total)
    return total


HAS_TABLES = IS_ARM64 or HAS_AVX2 or (IS_X86 and "ssse3" in FEATURES)
"""There is an instruction."""

_NAMES = {
    64: "llvm.x86.avx512.pshuf.b.512",
    32: "llvm.x86.avx2.pshuf.b",
    16: "llvm.aarch64.neon.tbl1.v16i8" if IS_ARM64 else "llvm.x86.ssse3.pshuf.b.128",
}


def table_bytes(builder: Builder, table: Value, index: Value) -> Value:
    """table[index] of <16 x i8>, indices 0 to 15."""
    if HAS_TABLES:
        return call(builder, _NAMES[16], lanes_of(i8), [table, index])
    out = ir.Constant(lanes_of(i8), ir.Undefined)
    for lane in range(LANES):
        at = ir.Constant(i32, lane)
        value = builder.extract_element(table, builder.extract_element(index, at))
        out = builder.insert_element(out, value, at)
    return out


def _selected(builder: Builder, entries: Sequence[int], codes: Value) -> Value:
    out = constant(i32, 0)
    for byte in range(4):
        code = builder.and_(builder.lshr(codes, constant(i32, 8 * byte)), constant(i32, 15))
        value = constant(i32, 0)
        for i, entry in enumerate(entries):
            hit = builder.icmp_signed("==", code, constant(i32, i))
            value = builder.select(hit, constant(i32, entry << (8 * byte)), value)
        out = builder.or_(out, value)
    return out


def look_up(builder: Builder, entries: Sequence[int], codes: Value) -> Value:
    """entries[code] of each byte of 16 lanes of 4; codes and entries are from 0 to 15 and 255."""
    if not HAS_TABLES:
        return _selected(builder, entries, codes)
    kind = lanes_of(i8, REGISTER_BYTES)
    table = ir.Constant(kind, list(entries) * (REGISTER_BYTES // LANES))

    def shuffle(index: Value) -> Any:
        found = call(builder, _NAMES[REGISTER_BYTES], kind, [table, as_bytes(builder, index)])
        return as_words(builder, found)

    return by_register(builder, shuffle, codes)


_I = I32x16

add_i32 = lanewise(lambda b, x, y: b.add(x, y), [_I, _I], _I)
mul_i32 = lanewise(lambda b, x, y: b.mul(x, y), [_I, _I], _I)
and_i32 = lanewise(lambda b, x, y: b.and_(x, y), [_I, _I], _I)
xor_i32 = lanewise(lambda b, x, y: b.xor(x, y), [_I, _I], _I)
shift_left = lanewise(lambda b, x, y: b.shl(x, y), [_I, _I], _I)
shift_right = lanewise(lambda b, x, y: b.lshr(x, y), [_I, _I], _I)
"""Zeros move in from above."""

low_nibble = lanewise(lambda b, x: b.and_(x, constant(i32, 15)), [_I], _I)
high_nibble = lanewise(lambda b, x: b.lshr(x, constant(i32, 4)), [_I], _I)
"""The high nibble of a byte, in each lane."""


def _high_nibbles(builder: Builder, x: Value) -> Value:
    return builder.and_(builder.lshr(x, constant(i32, 4)), constant(i32, 0x0F0F0F0F))


low_nibbles = lanewise(lambda b, x: b.and_(x, constant(i32, 0x0F0F0F0F)), [_I], _I)
high_nibbles = lanewise(_high_nibbles, [_I], _I)
"""The high nibbles of the 4 bytes in each lane."""


dot_u8_i8 = lanewise(dot_of_bytes, [_I, _I, _I], _I)
"""total + the sum over the 4 bytes of a lane of unsigned * signed."""


def _vector_of(builder: Builder, items: list[Any]) -> Value:
    out = ir.Constant(lanes_of(items[0].type), ir.Undefined)
    for lane, item in enumerate(items):
        out = builder.insert_element(out, item, ir.Constant(i32, lane))
    return out


def _floats_of_nibbles(builder: Builder, entries: list[Any], packed: Value) -> list[Any]:
    """See `load_nibbles_from_table`: vpermps looks at the lowest four bits of a lane's index."""
    table = _vector_of(builder, [builder.sitofp(entry, f32) for entry in entries])
    low = builder.zext(packed, lanes_of(i32))
    high = builder.lshr(low, constant(i32, 4))
    name = "llvm.x86.avx512.permvar.sf.512"
    return [call(builder, name, F32x16.llvm, [table, index]) for index in (low, high)]


def _floats_of_bytes(builder: Builder, entries: list[Any], packed: Value) -> list[Any]:
    """What `load_nibbles_from_table` gives, from a table of bytes."""
    table = _vector_of(builder, [builder.trunc(entry, i8) for entry in entries])
    both = []
    for codes in (builder.and_(packed, constant(i8, 15)), builder.lshr(packed, constant(i8, 4))):
        signed = builder.sext(table_bytes(builder, table, codes), lanes_of(i32))
        both.append(builder.sitofp(signed, lanes_of(f32)))
    return both


@intrinsic
def load_nibbles_from_table(typing: Typing, base: Kind, index: Kind, table: Kind) -> Intrinsic:
    """16 bytes at `index` -> table[low nibbles], table[high nibbles] as two F32x16.

    `table` is a tuple of 16 signed bytes that is known when compiling.
    """
    check_base(base)
    values = table.literal_value if isinstance(table, Literal) else None
    if values is None and not isinstance(table, BaseTuple):
        raise TypeError("the table must be a tuple")

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        where = pointer(context, builder, signature.args[0], args[0], args[1], i8, LANES)
        packed = builder.load(where, align=1)
        entries = [builder.extract_value(args[2], lane) for lane in range(LANES)]
        look_up = _floats_of_nibbles if HAS_AVX512 else _floats_of_bytes
        both = look_up(builder, entries, packed)
        return context.make_tuple(builder, signature.return_type, both)

    return UniTuple(F32x16, 2)(base, types.intp, table), generate
