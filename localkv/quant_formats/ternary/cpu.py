"""Weights of one or two bits in panels on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from llvmlite import ir

from localkv.quant_formats import ternary
from localkv.quant_formats.shared.cpu.panel_codes import (
    PanelFormat,
    Record,
    masked,
    record_scale,
    two_bit_words,
)
from localkv.simd.cpu_features import HAS_BYTE_SHUFFLE
from localkv.simd.shuffle import index_masks, look_up
from localkv.simd.vector import i16, i32, lanes_of

Q1_COLUMNS = tuple(8 * byte + bit for bit in range(8) for byte in range(4))
Q2_COLUMNS = tuple(
    16 * word + 4 * byte + i for word in range(2) for i in range(4) for byte in range(4)
)
"""Columns of a block in the order of its codes: the lowest bits of a word's bytes come first."""

PAIRS = lanes_of(i16, 32)
DIGITS = [[3 * (3**n * byte % 256) >> 8 for n in range(5)] for byte in range(256)]
FIRST_DIGITS = [sum(digit << 2 * n for n, digit in enumerate(of[:4])) for of in DIGITS]
"""The first four digits of each byte, two bits each."""

FIFTH_DIGIT = [of[4] for of in DIGITS]


def _all(value: int) -> ir.Constant:
    return ir.Constant(PAIRS, [value] * 32)


def _above_16_bits(b: Any, x: Any, factor: int) -> Any:
    """The upper half of each product of two 16-bit numbers: one instruction on x86."""
    wide = lanes_of(i32, 32)
    product = b.mul(b.zext(x, wide), ir.Constant(wide, [factor] * 32))
    return b.trunc(b.lshr(product, ir.Constant(wide, [16] * 32)), PAIRS)


def digit(b: Any, words: Any, n: int) -> Any:
    """Digit n of each byte: `bits 8 and 9 of 3 * (3^n byte modulo 256)`."""
    if not HAS_BYTE_SHUFFLE:
        return computed_digit(b, words, n)
    masks = index_masks(b, words, words, 0)
    if n == 4:
        return look_up(b, FIFTH_DIGIT, words, masks)
    # all blocks of a record look up the same, which LLVM does once
    return masked(b, look_up(b, FIRST_DIGITS, words, masks), 2 * n, 3)


def computed_digit(b: Any, words: Any, n: int) -> Any:
    """Digits without a table.

    Each byte of a pair is moved to the upper half of 16 bits, where a product wraps around as one
    of 8 bits does.
    """
    pairs = b.bitcast(words, PAIRS)
    low = b.mul(pairs, _all(3**n << 8))
    high = b.mul(b.and_(pairs, _all(0xFF00)), _all(3**n))
    low, high = (_above_16_bits(b, x, 3) for x in (low, high))
    return b.bitcast(b.or_(low, b.shl(high, _all(8))), lanes_of(i32))


def q1_codes(record: Record, block: int) -> list[Any]:
    """Twice the bits, so that all codes less 1 are values."""
    words = record.words("qs", block)
    return [masked(record.builder, words, bit - 1, 2) for bit in range(8)]


def q2_codes(record: Record, block: int) -> list[Any]:
    words = [record.words("qs", 2 * block + i) for i in range(2)]
    return [masked(record.builder, x, 2 * i, 3) for x in words for i in range(4)]


def tq1_codes(record: Record, block: int) -> list[Any]:
    """Words and digits lie in runs of 32 bytes, of 16, and of 4 (see `RUNS`)."""
    if block < 5:
        places = [("qs", i, block) for i in range(8)]
    else:
        places = [("qs", 8 + i, n) for n in range(5) for i in range(4)]
        places += [("qh", 0, n) for n in range(4)]
        places = places[8 * (block - 5) : 8 * (block - 4)]
    return [digit(record.builder, record.words(name, i), n) for name, i, n in places]


def tq2_codes(record: Record, block: int) -> list[Any]:
    shift = 2 * (block % 4)
    return [masked(record.builder, x, shift, 3) for x in two_bit_words(record, block)]


q1_0 = SimpleNamespace(
    PANELS=PanelFormat(ternary.q1_0.LAYOUT, q1_codes, record_scale, zero=1, columns=Q1_COLUMNS)
)
q2_0 = SimpleNamespace(
    PANELS=PanelFormat(ternary.q2_0.LAYOUT, q2_codes, record_scale, zero=1, columns=Q2_COLUMNS)
)
tq1_0 = SimpleNamespace(PANELS=PanelFormat(ternary.tq1_0.LAYOUT, tq1_codes, record_scale, zero=1))
tq2_0 = SimpleNamespace(PANELS=PanelFormat(ternary.tq2_0.LAYOUT, tq2_codes, record_scale, zero=1))
