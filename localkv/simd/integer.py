"""Integer vectors: nibbles of lanes and of bytes, a table of 16 bytes, 8-bit dot products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.types import Literal
from numba.core.types.containers import BaseTuple, UniTuple
from numba.extending import intrinsic

from localkv.simd.cpu_features import (
    FEATURES,
    HAS_AVX2,
    HAS_AVX512,
    IS_ARM64,
    IS_X86,
    REGISTER_BYTES,
)
from localkv.simd.dots import as_bytes, as_words, by_register, dot_of_bytes
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES
from localkv.simd.vector import (
    F32x16,
    I32x16,
    call,
    check_base,
    constant,
    f32,
    i8,
    i32,
    lanes_of,
    lanewise,
    pointer,
)

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
"""Of a byte, in each lane."""


def _high_nibbles(builder: Builder, x: Value) -> Value:
    return builder.and_(builder.lshr(x, constant(i32, 4)), constant(i32, 0x0F0F0F0F))


low_nibbles = lanewise(lambda b, x: b.and_(x, constant(i32, 0x0F0F0F0F)), [_I], _I)
high_nibbles = lanewise(_high_nibbles, [_I], _I)
"""Of each of the 4 bytes in each lane."""


dot_u8_i8 = lanewise(dot_of_bytes, [_I, _I, _I], _I)
"""total + the sum over the 4 bytes of a lane of unsigned * signed (`simd/dots.py`)."""


def _vector_of(builder: Builder, items: list[Any]) -> Value:
    out = ir.Constant(lanes_of(items[0].type), ir.Undefined)
    for lane, item in enumerate(items):
        out = builder.insert_element(out, item, ir.Constant(i32, lane))
    return out


def _floats_of_nibbles(builder: Builder, entries: list[Any], packed: Value) -> list[Any]:
    """As `load_nibbles_from_table`: vpermps looks at the lowest four bits of a lane's index."""
    table = _vector_of(builder, [builder.sitofp(entry, f32) for entry in entries])
    low = builder.zext(packed, lanes_of(i32))
    high = builder.lshr(low, constant(i32, 4))
    name = "llvm.x86.avx512.permvar.sf.512"
    return [call(builder, name, F32x16.llvm, [table, index]) for index in (low, high)]


def _floats_of_bytes(builder: Builder, entries: list[Any], packed: Value) -> list[Any]:
    """As `load_nibbles_from_table`, from a table of bytes."""
    table = _vector_of(builder, [builder.trunc(entry, i8) for entry in entries])
    both = []
    for codes in (
        builder.and_(packed, constant(i8, 15)),
        builder.lshr(packed, constant(i8, 4)),
    ):
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
