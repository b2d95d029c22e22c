"""What the panels of each weight format mean, as code that Numba's kernels are made of.

A format says how to get, from a record of a panel (`linear/panels.py`), the codes of 32 columns
as eight vectors of 16 rows x 4 unsigned bytes, the scale of each row and its minimum:

    w = scale (code - zero) + minimum

That is all that the kernels need. The functions here emit LLVM instructions; a format is chosen by
a Numba type (`PanelKind`), so one source makes one kernel per format, and Numba's cache knows them
apart in later processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from localkv.formats.bits import IQ4_CODEBOOK
from localkv.kernels.cpu.linear.job import BLOCK
from localkv.kernels.cpu.linear.panel_bytes import LANES
from localkv.kernels.cpu.linear.panels import LAYOUTS, PanelLayout
from localkv.simd.cpu_features import HAS_AVX512
from localkv.simd.memory import half_bits_to_float
from localkv.simd.vector import call, constant, f32, i8, i16, i32, i64, lanes_of

BLOCK_VECTORS = BLOCK // 4
"""Vectors of codes for them: 4 columns each."""


class Record:
    """Reads of one record, at an address that is known when the kernel runs."""

    def __init__(self, builder: Any, layout: PanelLayout, address: Any) -> None:
        self.builder = builder
        self.layout = layout
        self.address = address  # i8*

    def _load(self, plane: str, part: int, offset: int, item: ir.Type, n: int) -> Any:
        where = ir.Constant(i64, self.layout.offsets[plane, part] + offset)
        pointer = self.builder.gep(self.address, [where])
        pointer = self.builder.bitcast(pointer, lanes_of(item, n).as_pointer())
        return self.builder.load(pointer, align=1)

    def words(self, plane: str, index: int, part: int = 0) -> Any:
        """Word `index` (4 bytes) of all rows: <16 x i32>."""
        return self._load(plane, part, index * 4 * LANES, i32, LANES)

    def halves(self, plane: str, index: int = 0) -> Any:
        """fp16 number `index` of all rows: <16 x float>."""
        bits = self._load(plane, 0, index * 2 * LANES, i16, LANES)
        return half_bits_to_float(self.builder, bits)

    def small(self, plane: str, index: int) -> Any:
        """Byte `index` of all rows: <16 x i8>."""
        return self._load(plane, 0, index * LANES, i8, LANES)


def _masked(builder: Any, x: Any, shift: int, mask: int) -> Any:
    """Bits `mask` of each byte of x after a shift to the right (to the left if negative)."""
    if shift > 0:
        x = builder.lshr(x, constant(i32, shift))
    elif shift < 0:
        x = builder.shl(x, constant(i32, -shift))
    return builder.and_(x, constant(i32, mask * 0x01010101))


def _nibble_blocks(record: Record, block: int) -> list[Any]:
    """Codes of the formats with blocks of 32: 16 bytes, low nibbles first."""
    words = [record.words("qs", 4 * block + i) for i in range(4)]
    return [_masked(record.builder, x, shift, 15) for shift in (0, 4) for x in words]


def _five_bit_blocks(record: Record, block: int) -> list[Any]:
    high = record.words("qh", block)
    low = _nibble_blocks(record, block)
    b = record.builder
    return [b.or_(x, _masked(b, high, j - 4, 16)) for j, x in enumerate(low)]


def _byte_blocks(record: Record, block: int) -> list[Any]:
    return [record.words("qs", BLOCK_VECTORS * block + i) for i in range(BLOCK_VECTORS)]


def _codebook_blocks(record: Record, block: int) -> list[Any]:
    b = record.builder
    entries = [value + 128 for value in IQ4_CODEBOOK]
    return [_look_up(b, entries, x) for x in _nibble_blocks(record, block)]


def _look_up(builder: Any, entries: list[int], codes: Any) -> Any:
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


def _q4_k_codes(record: Record, block: int) -> list[Any]:
    words = [record.words("qs", block // 2 * 8 + i) for i in range(8)]
    return [_masked(record.builder, x, block % 2 * 4, 15) for x in words]


def _q5_k_codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    high = [_masked(b, record.words("qh", i), block - 4, 16) for i in range(8)]
    return [b.or_(x, y) for x, y in zip(_q4_k_codes(record, block), high, strict=True)]


def _q6_k_codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    half, quarter = divmod(block, 4)
    codes = []
    for i in range(8):
        low = record.words("ql", 8 * (quarter % 2) + i, half)
        high = record.words("qh", i, half)
        low = _masked(b, low, quarter // 2 * 4, 0x0F)
        codes.append(b.or_(low, _masked(b, high, 2 * quarter - 4, 0x30)))
    return codes


def _k_scale(record: Record, block: int, *, minimum: bool) -> Any:
    """Scale or minimum of a q4_K or q5_K block as <16 x float> (ggml's `get_scale_min_k4`)."""
    b = record.builder
    if block < 4:
        bits = record.small("scales", block + 4 * minimum)
        bits = b.and_(bits, constant(i8, 63))
    else:
        nibbles = record.small("scales", block + 4)
        low = b.lshr(nibbles, constant(i8, 4)) if minimum else b.and_(nibbles, constant(i8, 15))
        high = b.lshr(record.small("scales", block - 4 + 4 * minimum), constant(i8, 6))
        bits = b.or_(low, b.shl(high, constant(i8, 4)))
    return b.uitofp(b.zext(bits, lanes_of(i32)), lanes_of(f32))


def _d(record: Record, block: int, half: int) -> Any:
    return record.halves("d", block)


def _m(record: Record, block: int) -> Any:
    return record.halves("m", block)


def _k_block_scale(record: Record, block: int, half: int) -> Any:
    return record.builder.fmul(record.halves("d"), _k_scale(record, block, minimum=False))


def _k_block_minimum(record: Record, block: int) -> Any:
    b = record.builder
    return b.fneg(b.fmul(record.halves("dmin"), _k_scale(record, block, minimum=True)))


def _q6_k_scale(record: Record, block: int, half: int) -> Any:
    b = record.builder
    scale = b.sext(record.small("scales", 2 * block + half), lanes_of(i32))
    return b.fmul(record.halves("d"), b.sitofp(scale, lanes_of(f32)))


@dataclass(frozen=True)
class PanelFormat:
    """A format's panels and their meaning.

    Attributes:
        codes: (record, block) -> 8 vectors of 16 x 4 unsigned codes; vector j holds columns
            4 j to 4 j + 3 of the block.
        scale: (record, block, half) -> <16 x float>; half 1 differs only if `halves`.
        minimum: (record, block) -> <16 x float>, or None for formats that have none.
        zero: the code that means 0.
        halves: every 16 columns have a scale of their own.
    """

    layout: PanelLayout
    codes: Callable[[Record, int], list[Any]]
    scale: Callable[[Record, int, int], Any] = _d
    minimum: Callable[[Record, int], Any] | None = None
    zero: int = 0
    halves: bool = False

    @property
    def record_blocks(self) -> int:
        """Blocks of `BLOCK` columns in a record."""
        return self.layout.record_values // BLOCK


PANEL_FORMATS = {
    "q4_0": PanelFormat(LAYOUTS["q4_0"], _nibble_blocks, zero=8),
    "q4_1": PanelFormat(LAYOUTS["q4_1"], _nibble_blocks, minimum=_m),
    "q5_0": PanelFormat(LAYOUTS["q5_0"], _five_bit_blocks, zero=16),
    "q5_1": PanelFormat(LAYOUTS["q5_1"], _five_bit_blocks, minimum=_m),
    "q8_0": PanelFormat(LAYOUTS["q8_0"], _byte_blocks, zero=128),
    "iq4_nl": PanelFormat(LAYOUTS["iq4_nl"], _codebook_blocks, zero=128),
    "q4_K": PanelFormat(LAYOUTS["q4_K"], _q4_k_codes, _k_block_scale, _k_block_minimum),
    "q5_K": PanelFormat(LAYOUTS["q5_K"], _q5_k_codes, _k_block_scale, _k_block_minimum),
    "q6_K": PanelFormat(LAYOUTS["q6_K"], _q6_k_codes, _q6_k_scale, zero=32, halves=True),
}
"""By name. A type that is missing here is decoded tile by tile (`linear.py`)."""
