"""K-quants in panels on a CPU: how codes, scales and minima are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from localkv.quant_formats import k_quants
from localkv.quant_formats.shared.cpu.panel_codes import (
    PanelFormat,
    Record,
    WholeScales,
    bit_field,
    masked,
    two_bit_words,
    whole_number,
)
from localkv.simd.cpu_features import HAS_VNNI
from localkv.simd.vector import constant, f32, i8, i32, lanes_of

MOST_PLACE = 3 if HAS_VNNI else 2
"""q2_K's codes in bits 6 and 7 are larger than signed bytes, which other CPUs multiply."""


def record_factor(record: Record) -> Any:
    return record.halves("d")


def place(block: int) -> int:
    """Codes are four to the power of this times as large, which `q2_scale` makes up for."""
    return min(block % 4, MOST_PLACE)


def q2_codes(record: Record, block: int) -> list[Any]:
    shift, mask = 2 * (block % 4 - place(block)), 3 << 2 * place(block)
    return [masked(record.builder, x, shift, mask) for x in two_bit_words(record, block)]


def q2_bits(record: Record, block: int, half: int) -> Any:
    return record.builder.and_(record.small("scales", 2 * block + half), constant(i8, 15))


def q2_whole_scale(record: Record, block: int, half: int) -> Any:
    b = record.builder
    bits = whole_number(b, q2_bits(record, block, half))
    return b.fmul(bits, constant(f32, 0.25 ** place(block)))


def q2_scale(record: Record, block: int, half: int) -> Any:
    return record.builder.fmul(record.halves("d"), q2_whole_scale(record, block, half))


def q2_products(record: Record, block: int) -> list[Any]:
    """Codes times scales, up to 3 * 15."""
    b, shift = record.builder, 2 * (block % 4)
    codes = [masked(b, x, shift, 3) for x in two_bit_words(record, block)]
    bits = [b.zext(q2_bits(record, block, half), lanes_of(i32)) for half in range(2)]
    return [b.mul(code, bits[i // 4]) for i, code in enumerate(codes)]


def q2_whole_minimum(record: Record, block: int, half: int) -> Any:
    b = record.builder
    return whole_number(b, b.lshr(record.small("scales", 2 * block + half), constant(i8, 4)))


def q2_minimum(record: Record, block: int, half: int) -> Any:
    b = record.builder
    return b.fneg(b.fmul(record.halves("dmin"), q2_whole_minimum(record, block, half)))


def q3_codes(record: Record, block: int) -> list[Any]:
    b, shift = record.builder, 2 * (block % 4)
    low = [masked(b, x, shift, 3) for x in two_bit_words(record, block)]
    return [b.or_(x, masked(b, record.words("hmask", i), block - 2, 4)) for i, x in enumerate(low)]


def q3_bits(record: Record, block: int, half: int) -> Any:
    """Scales as `k_quants.q3_k_codes` reads them: <16 x i8>, -32 to 31."""
    b, group = record.builder, 2 * block + half
    low = bit_field(b, record.small("scales", group % 8), group // 8 * 4, 0x0F)
    high = bit_field(b, record.small("scales", 8 + group % 4), group // 4 * 2 - 4, 0x30)
    return b.sub(b.or_(low, high), constant(i8, 32))


def q3_whole_scale(record: Record, block: int, half: int) -> Any:
    return whole_number(record.builder, q3_bits(record, block, half), signed=True)


def q3_scale(record: Record, block: int, half: int) -> Any:
    return record.builder.fmul(record.halves("d"), q3_whole_scale(record, block, half))


Q3_SHIFT = 124


def q3_products(record: Record, block: int) -> list[Any]:
    """scale (code - 4) + 124, from 0 on, as scales are at most 31.

    With a scale below 0 that is |scale| ((7 - code) - 3) + 124. No byte carries into the next one.
    """
    b, codes = record.builder, q3_codes(record, block)
    out = []
    for half in range(2):
        scale = b.sext(q3_bits(record, block, half), lanes_of(i32))
        negative = b.icmp_signed("<", scale, constant(i32, 0))
        size = b.select(negative, b.neg(scale), scale)
        turned = b.select(negative, constant(i32, 0x07070707), constant(i32, 0))
        zero = b.select(negative, constant(i32, 3), constant(i32, 4))
        shift = b.sub(constant(i32, Q3_SHIFT), b.mul(size, zero))
        shift = b.mul(shift, constant(i32, 0x01010101))
        out += [b.add(b.mul(b.xor(x, turned), size), shift) for x in codes[4 * half : 4 * half + 4]]
    return out


def nibbles(record: Record, block: int) -> list[Any]:
    """The low four bits of the codes of a block of 32, of q4_K and q5_K."""
    words = [record.words("qs", block // 2 * 8 + i) for i in range(8)]
    return [masked(record.builder, x, block % 2 * 4, 15) for x in words]


def small_scale(record: Record, block: int, *, minimum: bool) -> Any:
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
    return whole_number(b, bits)


def six_bit_scale(record: Record, block: int, half: int) -> Any:
    return record.builder.fmul(record.halves("d"), small_scale(record, block, minimum=False))


def six_bit_minimum(record: Record, block: int, half: int) -> Any:
    b = record.builder
    return b.fneg(b.fmul(record.halves("dmin"), small_scale(record, block, minimum=True)))


def q5_codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    high = [masked(b, record.words("qh", i), block - 4, 16) for i in range(8)]
    return [b.or_(x, y) for x, y in zip(nibbles(record, block), high, strict=True)]


def q6_codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    half, quarter = divmod(block, 4)
    out = []
    for i in range(8):
        low = record.words("ql", 8 * (quarter % 2) + i, half)
        high = record.words("qh", i, half)
        low = masked(b, low, quarter // 2 * 4, 0x0F)
        out.append(b.or_(low, masked(b, high, 2 * quarter - 4, 0x30)))
    return out


def q6_scale(record: Record, block: int, half: int) -> Any:
    b = record.builder
    bits = b.sext(record.small("scales", 2 * block + half), lanes_of(i32))
    return b.fmul(record.halves("d"), b.sitofp(bits, lanes_of(f32)))


def _panels(name: str, codes: Any, scale: Any, minimum: Any = None, **facts: Any) -> Any:
    layout = getattr(k_quants, name).LAYOUT
    return SimpleNamespace(PANELS=PanelFormat(layout, codes, scale, minimum, **facts))


Q2_WHOLE = WholeScales(
    record_factor,
    q2_whole_scale,
    q2_products,
    minimum_factor=lambda record: record.halves("dmin"),
    minimum=q2_whole_minimum,
)
Q3_WHOLE = WholeScales(record_factor, q3_whole_scale, q3_products, Q3_SHIFT)
q2_k = _panels("q2_k", q2_codes, q2_scale, q2_minimum, halves=True, whole=Q2_WHOLE)
q3_k = _panels("q3_k", q3_codes, q3_scale, zero=4, halves=True, whole=Q3_WHOLE)
q4_k = _panels("q4_k", nibbles, six_bit_scale, six_bit_minimum)
q5_k = _panels("q5_k", q5_codes, six_bit_scale, six_bit_minimum)
q6_k = _panels("q6_k", q6_codes, q6_scale, zero=32, halves=True)
