"""Shuffles and transpositions of vectors of 16 words of 4 bytes, and looking up in tables.

Tables hold floats, a lane each, or bytes. With AVX512-VBMI a table of bytes is in registers: one
instruction looks up 64 bytes in 64 or 128 entries, and larger tables are looked up in pieces, which
masks then select. Elsewhere a table is in memory, that is in the first-level cache, and every lane
loads its entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.simd import LANES
from localkv.simd.cpu_features import HAS_AVX512, HAS_BYTE_SHUFFLE
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
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
    i64,
    lanes_of,
    lanewise,
    pointer,
    splat,
)

QUARTER = 4
"""Words that go together: as many as the smallest vector has."""


def shuffled(builder: Builder, x: Value, y: Value, mask: Sequence[int]) -> Value:
    """Words of x (0 to 15) and of y (from 16 on)."""
    return builder.shuffle_vector(x, y, ir.Constant(lanes_of(i32, len(mask)), list(mask)))


def in_quarters(items: Sequence[int]) -> list[int]:
    """A mask of the same items in each quarter: 0 to 3 of x's quarter, 4 to 7 of y's."""
    words = [item if item < QUARTER else LANES + item - QUARTER for item in items]
    return [start + word for start in range(0, LANES, QUARTER) for word in words]


def joined(builder: Builder, parts: Sequence[Any]) -> Value:
    """Two or four vectors of words as one, in that order."""
    while len(parts) > 1:
        n = 2 * parts[0].type.count
        parts = [
            shuffled(builder, x, y, range(n)) for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


WORD = 4
"""Bytes of one."""


@intrinsic
def transpose_words(typing: Typing, rows: Kind, stride: Kind, goal: Kind, flip: Kind) -> Intrinsic:
    """Words 0 to 3 of 16 rows become 4 vectors at `goal`: word 0 of all rows, word 1, ...

    `rows`, `goal` are addresses, `stride` counts bytes, and every word is xored with `flip`.
    """

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        rows, stride, goal, flip = args
        kinds = signature.args

        def row(lane: int) -> Any:
            offset = builder.mul(stride, ir.Constant(stride.type, lane))
            where = pointer(context, builder, kinds[0], rows, offset, i8)
            return builder.load(builder.bitcast(where, lanes_of(i32, 4).as_pointer()), align=1)

        # w[j]: rows j, 4 + j, 8 + j and 12 + j, one in each quarter
        w = [
            joined(builder, [row(j + start) for start in range(0, LANES, QUARTER)])
            for j in range(QUARTER)
        ]
        low, high = (0, 4, 1, 5), (2, 6, 3, 7)
        pairs = [
            [shuffled(builder, w[j], w[j + 1], in_quarters(half)) for j in (0, 2)]
            for half in (low, high)
        ]
        flips = splat(builder, flip)
        word = 0
        for x, y in pairs:
            for items in ((0, 1, 4, 5), (2, 3, 6, 7)):
                out = builder.xor(shuffled(builder, x, y, in_quarters(items)), flips)
                index = ir.Constant(stride.type, LANES * word)
                where = pointer(context, builder, kinds[2], goal, index, i32, LANES)
                builder.store(out, where, align=1)
                word += 1
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int32), generate


@intrinsic
def load_column(typing: Typing, rows: Kind, stride: Kind) -> Intrinsic:
    """A word of each of 16 rows, `stride` bytes apart, as a vector."""

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        rows, stride = args
        vector = ir.Constant(lanes_of(i32), ir.Undefined)
        for lane in range(LANES):
            offset = builder.mul(stride, ir.Constant(stride.type, lane))
            where = pointer(context, builder, signature.args[0], rows, offset, i8)
            word = builder.load(builder.bitcast(where, i32.as_pointer()), align=1)
            vector = builder.insert_element(vector, word, ir.Constant(i32, lane))
        return vector

    return I32x16(types.int64, types.int64), generate


def _bytes_apart(builder: Builder, words: Value) -> Value:
    order = [WORD * lane + byte for byte in range(WORD) for lane in range(LANES)]
    kind = lanes_of(i8, WORD * LANES)
    items = builder.bitcast(words, kind)
    mask = ir.Constant(lanes_of(i32, WORD * LANES), order)
    return builder.bitcast(builder.shuffle_vector(items, items, mask), words.type)


bytes_apart = lanewise(_bytes_apart, [I32x16], I32x16)
"""The lowest bytes of all lanes, then the second lowest ones, ..."""


_LOW, _HIGH = in_quarters((0, 4, 1, 5)), in_quarters((2, 6, 3, 7))
_LOW_PAIRS, _HIGH_PAIRS = in_quarters((0, 1, 4, 5)), in_quarters((2, 3, 6, 7))


def _quarters(*quarters: int) -> list[int]:
    """A mask of whole quarters: 0 to 3 of x, 4 to 7 of y."""
    return [quarter * QUARTER + word for quarter in quarters for word in range(QUARTER)]


def _turned(builder: Builder, rows: list[Any]) -> list[Any]:
    """Vector j is word j of each of 16 rows: words within quarters first, then the quarters."""
    out: list[Any] = [None] * LANES
    quads = []
    for first in range(0, LANES, QUARTER):
        a, b, c, d = rows[first : first + QUARTER]
        mixed = [shuffled(builder, x, y, m) for m in (_LOW, _HIGH) for x, y in ((a, b), (c, d))]
        # quads[g][w]: in quarter j word 4 j + w of rows 4 g to 4 g + 3
        quads.append(
            [
                shuffled(builder, mixed[half], mixed[half + 1], pairs)
                for half in (0, 2)
                for pairs in (_LOW_PAIRS, _HIGH_PAIRS)
            ]
        )
    for word in range(QUARTER):
        a, b, c, d = (quad[word] for quad in quads)
        for half in (0, 1):
            # quarters `half` and `half + 2` of rows 0 to 7 and of rows 8 to 15
            x = shuffled(builder, a, b, _quarters(half, half + 4, half + 2, half + 6))
            y = shuffled(builder, c, d, _quarters(half, half + 4, half + 2, half + 6))
            out[QUARTER * half + word] = shuffled(builder, x, y, _quarters(0, 1, 4, 5))
            out[QUARTER * (half + 2) + word] = shuffled(builder, x, y, _quarters(2, 3, 6, 7))
    return out


@intrinsic
def turn_rows(typing: Typing, base: Kind, stride: Kind, like: Kind, goal: Kind) -> Intrinsic:
    """16 vectors at `goal`: floats 0 of as many rows as `like` has vectors, floats 1, ...

    Rows are `stride` floats apart; lanes beyond them are arbitrary.
    """
    check_base(base)
    check_base(goal)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        rows: list[Any] = []
        index = ir.Constant(args[1].type, 0)
        for _ in range(like.count):
            where = pointer(context, builder, signature.args[0], args[0], index, f32, LANES)
            rows.append(builder.load(where, align=4))
            index = builder.add(index, args[1])
        rows += [ir.Constant(lanes_of(f32), 0)] * (LANES - len(rows))
        for i, column in enumerate(_turned(builder, rows)):
            at = ir.Constant(args[1].type, i * LANES)
            where = pointer(context, builder, signature.args[3], args[3], at, f32, LANES)
            builder.store(column, where, align=4)
        return context.get_dummy_value()

    return types.void(base, types.intp, like, goal), generate


@intrinsic
def add_turned_rows(
    typing: Typing, base: Kind, stride: Kind, like: Kind, source: Kind
) -> Intrinsic:
    """Add 16 vectors at `source` to rows: lane i of vector j to float j of row i."""
    check_base(base)
    check_base(source)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        vectors = []
        for i in range(LANES):
            at = ir.Constant(args[1].type, i * LANES)
            where = pointer(context, builder, signature.args[3], args[3], at, f32, LANES)
            vectors.append(builder.load(where, align=4))
        turned = _turned(builder, vectors)
        index = ir.Constant(args[1].type, 0)
        for i in range(like.count):
            where = pointer(context, builder, signature.args[0], args[0], index, f32, LANES)
            builder.store(builder.fadd(builder.load(where, align=4), turned[i]), where, align=4)
            index = builder.add(index, args[1])
        return context.get_dummy_value()

    return types.void(base, types.intp, like, source), generate


def _gathered(builder: Builder, table: Value, index: Value) -> Value:
    """table[index] of each lane, one load after the other."""
    out = ir.Constant(lanes_of(f32), ir.Undefined)
    for lane in range(LANES):
        at = builder.extract_element(index, ir.Constant(i32, lane))
        item = builder.load(builder.gep(table, [at]), align=4)
        out = builder.insert_element(out, item, ir.Constant(i32, lane))
    return out


@intrinsic
def gather_of_64(typing: Typing, base: Kind, index: Kind) -> Intrinsic:
    """The floats at `index` (I32x16, each below 64) of the 64 at `base`."""
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        start = ir.Constant(context.get_value_type(types.intp), 0)
        if not HAS_AVX512:
            table = pointer(context, builder, signature.args[0], args[0], start, f32)
            return _gathered(builder, table, args[1])

        def part(first: int) -> Value:
            at = builder.add(start, ir.Constant(start.type, first))
            where = pointer(context, builder, signature.args[0], args[0], at, f32, LANES)
            return builder.load(where, align=4)

        # vpermi2ps looks at the lowest five bits of a lane's index
        low, high = (
            call(
                builder,
                "llvm.x86.avx512.vpermi2var.ps.512",
                F32x16.llvm,
                [part(first), args[1], part(first + LANES)],
            )
            for first in (0, 2 * LANES)
        )
        is_low = builder.icmp_signed("<", args[1], constant(i32, 2 * LANES))
        return builder.select(is_low, low, high)

    return F32x16(base, I32x16), generate


@intrinsic
def look_up_f32(typing: Typing, base: Kind, codes: Kind) -> Intrinsic:
    """The floats at `codes` (I32x16, each below 16) of the 16 at `base`."""
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        zero = ir.Constant(context.get_value_type(types.intp), 0)
        if not HAS_AVX512:
            table = pointer(context, builder, signature.args[0], args[0], zero, f32)
            return _gathered(builder, table, args[1])
        where = pointer(context, builder, signature.args[0], args[0], zero, f32, LANES)
        table = builder.load(where, align=4)
        # vpermps looks at the lowest four bits of a lane's index
        return call(builder, "llvm.x86.avx512.permvar.sf.512", F32x16.llvm, [table, args[1]])

    return F32x16(base, I32x16), generate


BYTES = 4 * LANES
_BYTES = lanes_of(i8, BYTES)
_SMALL, _LARGE = BYTES, 2 * BYTES
"""Entries of tables that one instruction looks up."""


def _as_bytes(builder: Builder, x: Value) -> Value:
    return builder.bitcast(x, _BYTES)


def _in_pieces(builder: Builder, table: Sequence[int], index: Value, masks: list[Any]) -> Value:
    if not masks:
        low, high = (ir.Constant(_BYTES, list(part)) for part in (table[:BYTES], table[BYTES:]))
        return call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _BYTES, [low, index, high])
    half = len(table) // 2
    both = [_in_pieces(builder, part, index, masks[:-1]) for part in (table[half:], table[:half])]
    return builder.select(masks[-1], *both)


def look_up(
    builder: Builder, table: Sequence[int], index: Value, masks: Sequence[Value] = ()
) -> Value:
    """table[index] of each byte of a vector of words; only if `HAS_BYTE_SHUFFLE`.

    Args:
        table: 64 bytes, or 128 times a power of two.
        index: its lowest 6 or 7 bits; further bits may be anything if there are no `masks`.
        masks: of tables with more than 128 entries, bit 7 and so on: see `index_masks`.
    """
    index = _as_bytes(builder, index)
    if len(table) == _SMALL:
        entries = ir.Constant(_BYTES, list(table))
        found = call(builder, "llvm.x86.avx512.permvar.qi.512", _BYTES, [entries, index])
    else:
        assert len(table) == _LARGE << len(masks)
        found = _in_pieces(builder, table, index, list(masks))
    return builder.bitcast(found, lanes_of(i32))


def index_masks(builder: Builder, index: Value, upper: Value, n_upper: int) -> list[Value]:
    """Bit 7 of each byte of `index`, then the lowest `n_upper` bits of each byte of `upper`."""
    nothing = ir.Constant(_BYTES, [0] * BYTES)
    masks = [builder.icmp_signed("<", _as_bytes(builder, index), nothing)]
    for bit in range(n_upper):
        one = builder.and_(upper, constant(i32, 0x01010101 << bit))
        masks.append(builder.icmp_signed("!=", _as_bytes(builder, one), nothing))
    return masks


def fields(builder: Builder, words: Value, offsets: Sequence[int], n_bits: int) -> Value:
    """Four fields of `n_bits` of each word become its bytes, their lowest bits.

    Args:
        offsets: the lowest bit of each field; below 0, the first bits of a byte are not its own.

    A byte's bits above `n_bits`, or outside of the word, may be anything.
    """
    if HAS_BYTE_SHUFFLE:
        control = [(start + offset) % 64 for start in (0, 32) for offset in offsets]
        both = [ir.Constant(_BYTES, control * (BYTES // len(control))), _as_bytes(builder, words)]
        found = call(builder, "llvm.x86.avx512.pmultishift.qb.512", _BYTES, both)
        return builder.bitcast(found, lanes_of(i32))
    out: Any = constant(i32, 0)
    for byte, offset in enumerate(offsets):
        shift = offset - 8 * byte
        moved = builder.lshr(words, constant(i32, shift)) if shift > 0 else words
        moved = builder.shl(words, constant(i32, -shift)) if shift < 0 else moved
        mask = ((1 << n_bits) - 1) << (8 * byte)
        out = builder.or_(out, builder.and_(moved, constant(i32, mask)))
    return out


def load_entries(
    builder: Builder, name: str, entries: Sequence[int], item: ir.Type, index: Value
) -> Value:
    """entries[index] of each lane, from memory: <16 x item>.

    Args:
        name: of the table in the module; the same entries have the same name.
        index: <16 x i32>.
    """
    load = builder.module.globals.get(name) or _loader(builder.module, name, entries, item)
    return builder.call(load, [index])


def _loader(module: ir.Module, name: str, entries: Sequence[int], item: ir.Type) -> ir.Function:
    """A function that is called: in line, all these loads take LLVM seconds to compile."""
    kind = ir.ArrayType(item, len(entries))
    table = cgutils.global_constant(module, f"{name}.entries", ir.Constant(kind, list(entries)))
    signature = ir.FunctionType(lanes_of(item), [lanes_of(i32)])
    function = ir.Function(module, signature, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    out = ir.Constant(lanes_of(item), ir.Undefined)
    for lane in range(LANES):
        at = ir.Constant(i32, lane)
        place = builder.zext(builder.extract_element(function.args[0], at), i64)
        where = builder.gep(table, [ir.Constant(i64, 0), place])
        out = builder.insert_element(out, builder.load(where, align=item.width // 8), at)
    builder.ret(out)
    return function


def split_bytes(builder: Builder, x: Value, y: Value) -> tuple[Value, Value]:
    """Lower and upper bytes of two vectors of words of two halves each: x's go first."""
    both = [_as_bytes(builder, part) for part in (x, y)]
    out = []
    for first in (0, 1):
        order = [
            start + 4 * lane + byte
            for lane in range(LANES)
            for start in (0, BYTES)
            for byte in (first, first + 2)
        ]
        mixed = builder.shuffle_vector(*both, ir.Constant(lanes_of(i32, BYTES), order))
        out.append(builder.bitcast(mixed, lanes_of(i32)))
    return out[0], out[1]


def widened(builder: Builder, x: Value) -> Value:
    """<16 x i8> or <16 x i16>, unsigned -> <16 x i32>."""
    assert x.type.element in (i8, i16)
    return builder.zext(x, lanes_of(i32))
