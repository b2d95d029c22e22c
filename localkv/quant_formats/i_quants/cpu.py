"""I-quants in panels on a CPU: places in a grid, each of 4 or 8 neighbouring values.

A *group* are the columns of one place; a word has the places of four groups. Values have a *flag*:
the sign, or for iq1 the direction of a shift.

With AVX512-VBMI a grid is in registers. Its points are packed: a byte has the levels of two or of
four columns, and one instruction looks up the bytes of 64 points, of 16 rows x 4 groups. A second
look-up turns levels and flags into codes. So what comes to lie in a word are columns of its groups:
the columns of a block are in another order (`PanelFormat.columns`), which activations follow.

Elsewhere each row loads its points, whole words of columns in their order, from a table in the
first-level cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from localkv.quant_formats import i_quants
from localkv.quant_formats.i_quants import IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, Grid
from localkv.quant_formats.shared.cpu.panel_codes import PanelFormat, Record, bit_field
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK
from localkv.simd.cpu_features import HAS_BYTE_SHUFFLE
from localkv.simd.kinds import Builder, Value
from localkv.simd.memory import half_bits_to_float
from localkv.simd.shuffle import fields, index_masks, load_entries, look_up, split_bytes, widened
from localkv.simd.vector import constant, f32, i16, i32, i64, lanes_of

EVERY_BYTE = 0x01010101
SPREAD = 0x00204081
"""A factor that moves four bits to the lowest bits of four bytes."""


@dataclass(frozen=True)
class GridCodes:
    """How points of a grid become codes of a panel (`PanelFormat`).

    Attributes:
        zero: the code that means 0.
        factor: a value of the grid stands for `factor` times itself.
        shift: if flags are no signs, one that is set takes that much away, else it is added.
        flag_bits: where the flag of each column of a block is, in a word.
        halves: every 16 columns have a scale of their own; only with groups of 8.
    """

    grid: Grid
    zero: int
    factor: int = 1
    shift: int = 0
    flag_bits: tuple[int, ...] = tuple(range(BLOCK))
    halves: bool = False

    def code(self, level: int, flag: int) -> int:
        """What a place in the grid's levels means; bits allow of more than there are."""
        if level >= len(self.grid.levels):
            return 0
        value = self.factor * self.grid.levels[level]
        if self.shift:
            return self.zero + value + (-self.shift if flag else self.shift)
        return self.zero + (-value if flag else value)

    @property
    def n_upper(self) -> int:
        """Bits of a place above the lowest eight."""
        return (len(self.grid.codes) - 1).bit_length() - 8

    @cached_property
    def word_columns(self) -> list[list[int]]:
        """The columns of the bytes of the words of the block's eight vectors."""
        if not HAS_BYTE_SHUFFLE:
            return [list(range(first, first + 4)) for first in range(0, BLOCK, 4)]
        if self.grid.n_values == 4:
            starts, order = (0, 16), (0, 4, 8, 12)
        elif self.halves:
            starts, order = (0, 16), (0, 8, 4, 12)
        else:
            starts, order = (0, 4), (0, 8, 16, 24)
        return [[start + i + column for column in order] for start in starts for i in range(4)]

    @property
    def columns(self) -> tuple[int, ...] | None:
        """The columns that `PanelFormat` wants."""
        if not HAS_BYTE_SHUFFLE:
            return None
        return tuple(column for word in self.word_columns for column in word)

    @cached_property
    def packed(self) -> list[list[int]]:
        """The points' levels in bytes: of columns 0 to 3 and 4 to 7; of four, of 0, 1 and 2, 3."""
        shifts = (0, 5) if self.grid.n_values == 4 else (0, 2, 4, 6)
        levels = self.grid.codes.reshape(len(self.grid.codes), 2, len(shifts)).astype(np.int64)
        both = (levels << np.array(shifts)).sum(-1)
        return [both[:, i].tolist() for i in range(2)]

    @cached_property
    def meanings(self) -> list[list[int]]:
        """Codes by six bits of packed levels and flags, of both columns of a pair."""
        if self.grid.n_values == 4:
            places = [(0, 7, 3), (1, 7, 0)]
        else:
            places = [(0, 3, 4), (2, 3, 4 if self.shift else 5)]
        return [
            [self.code(i >> level & mask, i >> flag & 1) for i in range(64)]
            for level, mask, flag in places
        ]

    @cached_property
    def plain(self) -> list[int]:
        """The points' codes without flags, as words or pairs of them; less zero unless shifted."""
        zero = 0 if self.shift else self.zero
        of_level = np.array([self.code(i, 0) - zero for i in range(len(self.grid.levels))])
        values = of_level[self.grid.codes].astype(np.int64)
        entries: list[int] = (values << (8 * np.arange(self.grid.n_values))).sum(-1).tolist()
        return entries


def grid_codes(
    b: Builder, kind: GridCodes, places: Sequence[Value], upper: Sequence[Value], flags: Value
) -> list[Any]:
    """The codes of a block, as `PanelFormat.codes`.

    Args:
        places: words with the lowest 8 bits of places: one for groups of 8, two for groups of 4.
        upper: as many with further bits, the lowest ones of each byte; if there are any.
        flags: of all columns.
    """
    emit = _from_registers if HAS_BYTE_SHUFFLE else _from_memory
    return emit(b, kind, places, upper, flags)


def _from_registers(
    b: Builder, kind: GridCodes, places: Sequence[Value], upper: Sequence[Value], flags: Value
) -> list[Any]:
    sources = []
    for i, place in enumerate(places):
        masks = index_masks(b, place, upper[i] if upper else place, kind.n_upper)
        sources.append([look_up(b, table, place, masks) for table in kind.packed])
    # a pair of columns is two of a byte's levels (`GridCodes.meanings`) and their flags
    if kind.grid.n_values == 4:
        pairs = [pair for source in sources for pair in source]
        levels, first_flag, second = 0xE7, 3, 4
    else:
        fours = _by_halves(b, *sources[0]) if kind.halves else sources[0]
        pairs = [x for four in fours for x in (four, b.lshr(four, constant(i32, 4)))]
        levels, first_flag, second = 0x0F, 4, 0
    out = []
    for i, pair in enumerate(pairs):
        bits = [kind.flag_bits[column] - first_flag for column in kind.word_columns[2 * i]]
        index = b.or_(
            b.and_(pair, constant(i32, levels * EVERY_BYTE)),
            b.and_(fields(b, flags, bits, 8), constant(i32, (255 - levels) * EVERY_BYTE)),
        )
        out.append(look_up(b, kind.meanings[0], index))
        index = b.lshr(index, constant(i32, second)) if second else index
        out.append(look_up(b, kind.meanings[1], index))
    return out


def _by_halves(b: Builder, low: Value, high: Value) -> list[Value]:
    """Bytes of groups 0 to 3 -> two from each: of groups 0 and 1, and of groups 2 and 3."""
    lower, upper = constant(i32, 0xFFFF), constant(i32, 0xFFFF0000)
    sixteen = constant(i32, 16)
    first = b.or_(b.and_(low, lower), b.shl(high, sixteen))
    return [first, b.or_(b.lshr(low, sixteen), b.and_(high, upper))]


def _from_memory(
    b: Builder, kind: GridCodes, places: Sequence[Value], upper: Sequence[Value], flags: Value
) -> list[Any]:
    wide = kind.grid.n_values == 8
    name = f"grid.{kind.grid.n_values}.{len(kind.plain)}.{kind.plain[0]}.{kind.plain[-1]}"
    words = []
    for i, place in enumerate(places):
        for byte in range(4):
            index = b.and_(b.lshr(place, constant(i32, 8 * byte)), constant(i32, 255))
            if upper:
                more = b.lshr(upper[i], constant(i32, 8 * byte))
                more = b.and_(more, constant(i32, (1 << kind.n_upper) - 1))
                index = b.or_(index, b.shl(more, constant(i32, 8)))
            entry = load_entries(b, name, kind.plain, i64 if wide else i32, index)
            if wide:
                words.append(b.trunc(entry, lanes_of(i32)))
                entry = b.trunc(b.lshr(entry, constant(i64, 32)), lanes_of(i32))
            words.append(entry)
    return [_flagged(b, kind, word, flags, 4 * i) for i, word in enumerate(words)]


def _flagged(b: Builder, kind: GridCodes, word: Value, flags: Value, column: int) -> Value:
    """Codes of four columns; what is in a byte is never below 0."""
    flag = b.lshr(flags, constant(i32, kind.flag_bits[column]))
    if kind.shift:
        bits = b.and_(flag, constant(i32, 1))
        return b.sub(word, b.mul(bits, constant(i32, 2 * kind.shift * EVERY_BYTE)))
    bits = b.mul(b.and_(flag, constant(i32, 15)), constant(i32, SPREAD))
    bits = b.and_(bits, constant(i32, EVERY_BYTE))
    negative = b.sub(b.shl(bits, constant(i32, 8)), bits)
    twice = b.and_(b.shl(word, constant(i32, 1)), negative)
    return b.sub(b.add(word, constant(i32, kind.zero * EVERY_BYTE)), twice)


EVEN_SIGNS = [i | (i.bit_count() % 2) << 7 for i in range(128)]


def even_signs(b: Builder, words: Value, offsets: Sequence[int]) -> Value:
    """Signs of 32 columns from four fields of 7 bits (`i_quants.even_signs`)."""
    bits = fields(b, words, offsets, 7)
    if HAS_BYTE_SHUFFLE:
        return look_up(b, EVEN_SIGNS, bits)
    parity = bits
    for shift, mask in ((4, 0x07), (2, 0x03), (1, 0x01)):
        moved = b.and_(b.lshr(parity, constant(i32, shift)), constant(i32, mask * EVERY_BYTE))
        parity = b.xor(parity, moved)
    top = b.and_(b.shl(parity, constant(i32, 7)), constant(i32, 0x80 * EVERY_BYTE))
    return b.or_(bits, top)


def odd_scale(b: Builder, d: Value, bits: Value, factor: float) -> Any:
    """d (2 bits + 1) factor; the factor is a power of two."""
    odd = b.or_(b.shl(bits, constant(i32, 1)), constant(i32, 1))
    return b.fmul(b.fmul(d, constant(f32, factor)), b.uitofp(odd, lanes_of(f32)))


def scale_of_nibble(record: Record, index: int, upper: int, factor: float) -> Any:
    """The scale of a nibble of byte `index` of the scales, as `odd_scale` makes it."""
    b = record.builder
    bits = b.zext(bit_field(b, record.small("scales", index), 4 * upper, 15), lanes_of(i32))
    return odd_scale(b, record.halves("d"), bits, factor)


KIND_IQ3_S = GridCodes(IQ3_S, zero=15)


def codes_iq3_s(record: Record, block: int) -> list[Any]:
    b = record.builder
    high = widened(b, record.small("qh", block))
    places = [record.words("qs", 2 * block + i) for i in range(2)]
    upper = [fields(b, high, range(start, start + 4), 1) for start in (0, 4)]
    return grid_codes(b, KIND_IQ3_S, places, upper, record.words("signs", block))


def scale_iq3_s(record: Record, block: int, half: int) -> Any:
    return scale_of_nibble(record, block // 2, block % 2, 1.0)


KIND_IQ3_XXS = GridCodes(IQ3_XXS, zero=62)


def codes_iq3_xxs(record: Record, block: int) -> list[Any]:
    b = record.builder
    signs = even_signs(b, record.words("signs", block), (0, 7, 14, 21))
    return grid_codes(
        b, KIND_IQ3_XXS, [record.words("qs", 2 * block + i) for i in range(2)], [], signs
    )


def scale_iq3_xxs(record: Record, block: int, half: int) -> Any:
    b = record.builder
    bits = b.lshr(record.words("signs", block), constant(i32, 28))
    return odd_scale(b, record.halves("d"), bits, 1 / 4)


KIND_IQ2_S = GridCodes(IQ2_S, zero=43, halves=True)


def codes_iq2_s(record: Record, block: int) -> list[Any]:
    b = record.builder
    upper = fields(b, widened(b, record.small("qh", block)), (0, 2, 4, 6), 2)
    places, signs = record.words("qs", block), record.words("signs", block)
    return grid_codes(b, KIND_IQ2_S, [places], [upper], signs)


def scale_of_half(record: Record, block: int, half: int) -> Any:
    """iq2_s's and iq2_xs's."""
    return scale_of_nibble(record, block, half, 1 / 8)


KIND_IQ2_XS = GridCodes(IQ2_XS, zero=43, halves=True)


def codes_iq2_xs(record: Record, block: int) -> list[Any]:
    b = record.builder
    words = [record.words("qs", 2 * block + i) for i in range(2)]
    places, upper = split_bytes(b, *words)
    signs = even_signs(b, upper, (1, 9, 17, 25))
    return grid_codes(b, KIND_IQ2_XS, [places], [upper], signs)


KIND_IQ2_XXS = GridCodes(IQ2_XXS, zero=43)


def codes_iq2_xxs(record: Record, block: int) -> list[Any]:
    b = record.builder
    signs = even_signs(b, record.words("qs", 2 * block + 1), (0, 7, 14, 21))
    return grid_codes(b, KIND_IQ2_XXS, [record.words("qs", 2 * block)], [], signs)


def scale_iq2_xxs(record: Record, block: int, half: int) -> Any:
    b = record.builder
    bits = b.lshr(record.words("qs", 2 * block + 1), constant(i32, 28))
    return odd_scale(b, record.halves("d"), bits, 1 / 8)


KIND_IQ1_M = GridCodes(
    IQ1,
    zero=9,
    factor=8,
    shift=1,
    flag_bits=tuple(4 * (column // 8) + 3 for column in range(32)),
    halves=True,
)


def codes_iq1_m(record: Record, block: int) -> list[Any]:
    b = record.builder
    high = widened(b, record.shorts("qh", block))
    upper = fields(b, high, (0, 4, 8, 12), 3)
    return grid_codes(b, KIND_IQ1_M, [record.words("qs", block)], [upper], high)


def _super_scale(record: Record) -> Any:
    """A half; each word has four bits of it, the lowest ones first."""
    b = record.builder
    bits = None
    for i in range(4):
        part = b.and_(record.shorts("scales", i), constant(i16, 0xF000))
        part = b.lshr(part, constant(i16, 12 - 4 * i)) if i < 3 else part
        bits = part if bits is None else b.or_(bits, part)
    return half_bits_to_float(b, bits)


def scale_iq1_m(record: Record, block: int, half: int) -> Any:
    b = record.builder
    pair, place = divmod(2 * block + half, 4)
    bits = b.lshr(widened(b, record.shorts("scales", pair)), constant(i32, 3 * place))
    return odd_scale(b, _super_scale(record), b.and_(bits, constant(i32, 7)), 1 / 8)


KIND_IQ1_S = GridCodes(IQ1, zero=9, factor=8, shift=1, flag_bits=(15,) * 32)


def codes_iq1_s(record: Record, block: int) -> list[Any]:
    b = record.builder
    high = widened(b, record.shorts("qh", block))
    upper = fields(b, high, (0, 3, 6, 9), 3)
    return grid_codes(b, KIND_IQ1_S, [record.words("qs", block)], [upper], high)


def scale_iq1_s(record: Record, block: int, half: int) -> Any:
    b = record.builder
    bits = b.lshr(widened(b, record.shorts("qh", block)), constant(i32, 12))
    return odd_scale(b, record.halves("d"), b.and_(bits, constant(i32, 7)), 1 / 8)


def _panels(name: str, codes: Any, scale: Any, kind: GridCodes) -> SimpleNamespace:
    layout = getattr(i_quants, name).LAYOUT
    return SimpleNamespace(
        PANELS=PanelFormat(
            layout,
            codes,
            scale,
            zero=kind.zero,
            halves=kind.halves,
            columns=kind.columns,
            is_costly=True,
        )
    )


iq3_s = _panels("iq3_s", codes_iq3_s, scale_iq3_s, KIND_IQ3_S)
iq3_xxs = _panels("iq3_xxs", codes_iq3_xxs, scale_iq3_xxs, KIND_IQ3_XXS)
iq2_s = _panels("iq2_s", codes_iq2_s, scale_of_half, KIND_IQ2_S)
iq2_xs = _panels("iq2_xs", codes_iq2_xs, scale_of_half, KIND_IQ2_XS)
iq2_xxs = _panels("iq2_xxs", codes_iq2_xxs, scale_iq2_xxs, KIND_IQ2_XXS)
iq1_m = _panels("iq1_m", codes_iq1_m, scale_iq1_m, KIND_IQ1_M)
iq1_s = _panels("iq1_s", codes_iq1_s, scale_iq1_s, KIND_IQ1_S)
