"""Look-up of many bytes at once in a table of 16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from localkv.simd.cpu_features import FEATURES, HAS_AVX2, IS_ARM64, IS_X86, REGISTER_BYTES
from localkv.simd.kinds import Builder, Value
from localkv.simd.lanes import LANES
from localkv.simd.registers import as_bytes, as_words, by_register
from localkv.simd.vector import call, constant, i8, i32, lanes_of

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
