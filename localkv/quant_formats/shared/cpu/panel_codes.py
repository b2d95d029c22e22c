"""What panels mean, as code that Numba's kernels are made of: `PANELS` of `<folder>/cpu.py`.

A format says how to read a record of a panel (`panel_layout.py`): how to get the codes of 32
columns as eight vectors of 16 rows x 4 unsigned bytes. It also says how to get the scale of each
row and its minimum:

    w = scale (code - zero) + minimum

That is all that the kernels need. The functions here emit LLVM instructions; a kernel is compiled
for one format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from llvmlite import ir

from localkv.quant_formats import FORMATS
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK, LANES, PanelLayout
from localkv.simd.cpu_features import HAS_SIGNED_BYTE_DOTS
from localkv.simd.memory import half_bits_to_float
from localkv.simd.vector import constant, f32, i8, i16, i32, i64, lanes_of

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

    def shorts(self, plane: str, index: int) -> Any:
        """Bytes 2 index and 2 index + 1 of all rows: <16 x i16>."""
        return self._load(plane, 0, index * 2 * LANES, i16, LANES)

    def halves(self, plane: str, index: int = 0) -> Any:
        """fp16 number `index` of all rows: <16 x float>."""
        return half_bits_to_float(self.builder, self.shorts(plane, index))

    def small(self, plane: str, index: int) -> Any:
        """Byte `index` of all rows: <16 x i8>."""
        return self._load(plane, 0, index * LANES, i8, LANES)


def masked(builder: Any, x: Any, shift: int, mask: int) -> Any:
    """Bits `mask` of each byte of x after a shift to the right (to the left if negative)."""
    if shift > 0:
        x = builder.lshr(x, constant(i32, shift))
    elif shift < 0:
        x = builder.shl(x, constant(i32, -shift))
    return builder.and_(x, constant(i32, mask * 0x01010101))


def bit_field(builder: Any, x: Any, shift: int, mask: int) -> Any:
    """Bits `mask` of <16 x i8> after a shift to the right (to the left if negative)."""
    if shift > 0:
        x = builder.lshr(x, constant(i8, shift))
    elif shift < 0:
        x = builder.shl(x, constant(i8, -shift))
    return builder.and_(x, constant(i8, mask))


def whole_number(builder: Any, x: Any, *, signed: bool = False) -> Any:
    """<16 x i8> as <16 x float>."""
    if signed:
        return builder.sitofp(builder.sext(x, lanes_of(i32)), lanes_of(f32))
    return builder.uitofp(builder.zext(x, lanes_of(i32)), lanes_of(f32))


def nibble_codes(record: Record, block: int) -> list[Any]:
    """Codes of the formats with blocks of 32: 16 bytes, low nibbles first."""
    words = [record.words("qs", 4 * block + i) for i in range(4)]
    return [masked(record.builder, x, shift, 15) for shift in (0, 4) for x in words]


def block_scale(record: Record, block: int, half: int) -> Any:
    """A scale per block of 32."""
    return record.halves("d", block)


def block_minimum(record: Record, block: int, half: int) -> Any:
    """A minimum per block of 32."""
    return record.halves("m", block)


@dataclass(frozen=True)
class WholeScales:
    """Scales and minima that are whole numbers times one factor of a record.

    Sums of a record are multiplied by the factor once. Until then they are sums of integers times
    scales of activations, and a block's are exact, however its two halves are added up.

    Attributes:
        factor: record -> <16 x float>.
        scale: (record, block, half) -> a whole number as <16 x float>.
        products: (record, block) -> eight vectors as `PanelFormat.codes` has them, of
            scale (code - zero) + `shift`, which fits a byte.
        shift: a multiple of `PanelFormat.zero`.
        minimum_factor, minimum: the same of minima, which are taken off; or None.
    """

    factor: Callable[[Record], Any]
    scale: Callable[[Record, int, int], Any]
    products: Callable[[Record, int], list[Any]]
    shift: int = 0
    minimum_factor: Callable[[Record], Any] | None = None
    minimum: Callable[[Record, int, int], Any] | None = None

    def minima(self, record: Record, block: int) -> list[Any]:
        return [self.minimum(record, block, half) for half in range(2)] if self.minimum else []

    def factors(self, record: Record) -> list[Any]:
        """The factors of scales, and of what minima add, if there are any."""
        out = [self.factor(record)]
        if self.minimum_factor is not None:
            out.append(record.builder.fneg(self.minimum_factor(record)))
        return out


@dataclass(frozen=True)
class PanelFormat:
    """A format's panels and their meaning.

    Attributes:
        codes: (record, block) -> 8 vectors of 16 x 4 unsigned codes; vector j holds columns
            4 j to 4 j + 3 of the block.
        scale: (record, block, half) -> <16 x float>; half 1 differs only if `halves`.
        minimum: the same, or None for formats that have none.
        zero: the code that means 0; it is 0 where there are minima. If it is 128, codes fill a
            byte; else they are at most 127.
        halves: every 16 columns have a scale, and a minimum, of their own.
        columns: the columns of the codes of a block where it is not as above: vector j holds
            columns[4 j] to columns[4 j + 3]. Halves stay together.
        is_costly: reading codes takes as long as multiplying them with some tokens, so that for
            many tokens they are read only once (`linear/tiles.py`).
        whole: what scales and minima of halves are made of, if that is of use.
    """

    layout: PanelLayout
    codes: Callable[[Record, int], list[Any]]
    scale: Callable[[Record, int, int], Any] = block_scale
    minimum: Callable[[Record, int, int], Any] | None = None
    zero: int = 0
    halves: bool = False
    columns: tuple[int, ...] | None = None
    is_costly: bool = False
    whole: WholeScales | None = None

    def scales(self, record: Record, block: int) -> list[Any]:
        """The scale of each part of a block that has its own."""
        return [self.scale(record, block, half) for half in range(1 + self.halves)]

    def minima(self, record: Record, block: int) -> list[Any]:
        """The minimum of each part; none where a format has none."""
        if self.minimum is None:
            return []
        return [self.minimum(record, block, half) for half in range(1 + self.halves)]

    @property
    def is_signed(self) -> bool:
        """Whether codes are multiplied as signed bytes, with 128 taken off."""
        return self.zero == 128 and HAS_SIGNED_BYTE_DOTS

    @property
    def surplus(self) -> int:
        """How much too large codes are that are multiplied."""
        return 0 if self.is_signed else self.zero

    @property
    def record_blocks(self) -> int:
        """Blocks of `BLOCK` columns in a record."""
        return self.layout.record_values // BLOCK


def panel_format(name: str) -> PanelFormat:
    """The panels of a weight type, by name."""
    return cast(PanelFormat, FORMATS[name].part("cpu").PANELS)


def two_bit_words(record: Record, block: int) -> list[Any]:
    """Words whose bytes have q2_K's or q3_K's codes of a block of 32 from bit 2 (block % 4) on."""
    return [record.words("qs", block // 4 * 8 + i) for i in range(8)]


def record_scale(record: Record, block: int, half: int) -> Any:
    """One for all 256 values."""
    return record.halves("d")
