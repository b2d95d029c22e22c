"""iq4_nl: nibbles that select from a codebook, and a scale."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from localkv.formats.bits import IQ4_CODEBOOK
from localkv.formats.cpu.panel_codes import PanelFormat, Record, nibble_codes
from localkv.formats.iq4_nl.cpu import LAYOUT
from localkv.simd.cpu_features import HAS_AVX512
from localkv.simd.vector import call, constant, i8, i32, lanes_of


def look_up(builder: Any, entries: list[int], codes: Any) -> Any:
    """entries[code] of each byte."""
    if HAS_AVX512:
        bytes64 = lanes_of(i8, 64)
        table = ir.Constant(bytes64, entries * 4)
        index = builder.bitcast(codes, bytes64)
        found = call(builder, "llvm.x86.avx512.pshuf.b.512", bytes64, [table, index])
        return builder.bitcast(found, lanes_of(i32))
    out = constant(i32, 0)
    for byte in range(4):
        code = builder.and_(builder.lshr(codes, constant(i32, 8 * byte)), constant(i32, 15))
        value = constant(i32, 0)
        for i, entry in enumerate(entries):
            hit = builder.icmp_signed("==", code, constant(i32, i))
            value = builder.select(hit, constant(i32, entry << (8 * byte)), value)
        out = builder.or_(out, value)
    return out


def codebook_codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    entries = [value + 128 for value in IQ4_CODEBOOK]
    return [look_up(b, entries, x) for x in nibble_codes(record, block)]


PANELS = PanelFormat(LAYOUT, codebook_codes, zero=128)
