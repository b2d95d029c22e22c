"""What the CPU's products with panels multiply: packed activations, panels, rows in the file.

Where CPUs multiply bytes (`simd/integer.py`) activations are rounded to 8 bits, 32 values to a
scale, as ggml does for quantised weights; otherwise they stay float32. They are packed for a tile
of T tokens, block after block of 32 columns:

    8 bits   T x 4 int8 for each 4 columns, then T each of SCALE (float32), START and SECOND_START
             (int32) or VALUE_SUMS (float32)
    float32  T floats for each column, then T sums of them, twice

Columns come in the order in which the format's codes have them (`PanelFormat.columns`).

Q8_0 is multiplied as it lies in the file: no copy is made when a model is loaded. The only token's
8 bits are in planes then: the codes of all blocks, then all scales, and the other three alike.

One token meets rows one after the other, so that memory is read from the first byte to the last:
several at once get 60 % of its speed. For more tokens a thread makes panels of rows in its cache. A
row's sums are the same either way, bit for bit: sums of integers are exact, and blocks are added
up in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.kernels.cpu.linear.jobs import ACTIVATION_BLOCK_BYTES, LAYOUTS
from localkv.kernels.cpu.linear.pieces import read_plane
from localkv.kernels.cpu.linear.rows import stack_memory
from localkv.quant_formats.shared.cpu.panel_codes import PanelFormat, panel_format
from localkv.quant_formats.shared.cpu.panel_layout import (
    BLOCK,
    FLIP_SIGNS,
    LANES,
    PLAIN,
    SPREAD_BITS,
)
from localkv.simd.arithmetic import i32x16
from localkv.simd.atomic import atomic_load
from localkv.simd.cpu_features import HAS_BYTE_DOTS, HAS_SIGNED_BYTE_DOTS
from localkv.simd.integer import dot_of_bytes, dot_of_signed_bytes, flipped, xor_i32
from localkv.simd.kinds import (
    Address,
    Args,
    Builder,
    Count,
    Intrinsic,
    Kind,
    Signature,
    Target,
    Typing,
    Value,
)
from localkv.simd.memory import (
    emit_stream_prefetch,
    get_i32,
    get_u8,
    get_u16,
    half_bits_to_float,
    load_i32,
    prefetch,
    put_f32,
    put_i32,
    put_u8,
    put_u16,
    store_i32,
)
from localkv.simd.shuffle import (
    WORD,
    bytes_apart,
    in_quarters,
    joined,
    load_column,
    shuffled,
    transpose_words,
)
from localkv.simd.vector import (
    I32x16,
    call,
    constant,
    f32,
    i8,
    i16,
    i32,
    i64,
    lanes_of,
    lanewise,
    splat,
)

F32X16, I32X16 = lanes_of(f32), lanes_of(i32)

SCALE, START, SECOND_START = range(3)
VALUE_SUMS = START, SECOND_START
"""What is known of a block in 8 bits, its codes aside, a word each.

First comes its scale. For weights whose codes are too large there is what integer products start
with, -surplus * the sum of the codes. For weights with minima there is the sum of the values, scale
* the sum of the codes. Both are of the first half and of the second where these have scales of
their own, else of all (and the second word is 0).
"""


@dataclass(frozen=True)
class PackedBlock:
    """Where the words of a block lie that was packed for a tile of `tokens`: bytes from its start.

    A block in float32 has a value for each column in place of codes, and two sums after them.
    """

    tokens: int

    def column(self, index: int, token: int) -> int:
        """A float32 column; `index` BLOCK is the sum, or with halves the first one's."""
        return 4 * (index * self.tokens + token)

    def codes(self, word: int, token: int) -> int:
        """The codes of 8 bits of columns 4 word to 4 word + 3."""
        return 4 * (word * self.tokens + token)

    def fact(self, name: int, token: int) -> int:
        """A fact of 8 bits: SCALE, START, SECOND_START or one of VALUE_SUMS."""
        return BLOCK * self.tokens + 4 * (name * self.tokens + token)


def index_of(value: int) -> Any:
    return ir.Constant(i64, value)


def pointer_at(builder: Builder, address: Value, offset: Value, target: ir.Type) -> Value:
    """i8* plus an offset in bytes, as a pointer to `target`."""
    if isinstance(offset, int):
        offset = index_of(offset)
    return builder.bitcast(builder.gep(address, [offset]), target.as_pointer())


def load_at(builder: Builder, address: Value, offset: Value, target: ir.Type) -> Value:
    return builder.load(pointer_at(builder, address, offset, target), align=1)


def store_at(builder: Builder, value: Value, address: Value, offset: Value) -> None:
    builder.store(value, pointer_at(builder, address, offset, value.type), align=1)


def as_address(builder: Builder, value: Value) -> Value:
    return builder.inttoptr(value, i8.as_pointer())


def total_of(b: Builder, x: Value, operation: str) -> Value:
    """All lanes added up ("fadd": one after the other), or the largest one ("smax")."""
    item, arguments = x.type.element, [x]
    if operation == "fadd":
        arguments.insert(0, ir.Constant(f32, 0.0))
    suffix = "f32" if item is f32 else "i32"
    return call(b, f"llvm.vector.reduce.{operation}.v16{suffix}", item, arguments)


@dataclass(frozen=True)
class _Slots:
    """The place of a word, one of `n`: word i of number `index`."""

    start: Any
    n: Any
    index: Any

    def store(self, b: Builder, value: Value, i: int) -> None:
        slot = b.add(b.mul(index_of(i), self.n), self.index)
        store_at(b, value, self.start, b.mul(slot, index_of(4)))


def _pack_integers(
    b: Builder, fmt: PanelFormat, x: list[Any], code_words: _Slots, facts: _Slots
) -> None:
    """Two vectors of 16 columns of a token -> 8 words of codes, and what is known of them.

    Words hold columns in the format's order.
    """
    # magnitudes are ordered as their bits are, and NaN comes after all of them
    bits = [b.and_(b.bitcast(v, I32X16), constant(i32, 0x7FFFFFFF)) for v in x]
    top = total_of(b, call(b, "llvm.smax.v16i32", I32X16, bits), "smax")
    is_nan = b.icmp_signed(">", top, ir.Constant(i32, 0x7F800000))
    top = b.select(is_nan, ir.Constant(f32, float("nan")), b.bitcast(top, f32))
    scale = b.fdiv(top, ir.Constant(f32, 127.0))
    is_zero = b.fcmp_ordered("==", top, ir.Constant(f32, 0.0))
    inverse = b.fdiv(ir.Constant(f32, 127.0), top)
    inverse = splat(b, b.select(is_zero, ir.Constant(f32, 0.0), inverse))
    totals, halves = [], []
    for values in x:
        rounded = call(b, "llvm.rint.v16f32", F32X16, [b.fmul(values, inverse)])
        codes = b.fptosi(rounded, I32X16)
        totals.append(total_of(b, codes, "add"))
        halves.append(b.trunc(codes, lanes_of(i8)))
    order = ir.Constant(lanes_of(i32, BLOCK), list(fmt.columns or range(BLOCK)))
    words = b.bitcast(b.shuffle_vector(*halves, order), lanes_of(i32, BLOCK // 4))
    for j in range(BLOCK // 4):
        code_words.store(b, b.extract_element(words, ir.Constant(i32, j)), j)
    if not fmt.halves:
        totals = [b.add(*totals), ir.Constant(i32, 0)]
    facts.store(b, scale, SCALE)
    for half, total in enumerate(totals):
        if fmt.minimum is None:
            facts.store(
                b, b.mul(ir.Constant(i32, -fmt.surplus), total), (START, SECOND_START)[half]
            )
        else:
            facts.store(b, b.fmul(scale, b.sitofp(total, f32)), VALUE_SUMS[half])


def _pack_floats(b: Builder, fmt: PanelFormat, x: list[Any], values: _Slots) -> None:
    for i, column in enumerate(fmt.columns or range(BLOCK)):
        half, lane = divmod(column, LANES)
        values.store(b, b.extract_element(x[half], ir.Constant(i32, lane)), i)
    for half, part in enumerate(x if fmt.halves else [b.fadd(*x)]):
        values.store(b, total_of(b, part, "fadd"), BLOCK + half)


def _columns(b: Builder, x: Value, n_in: Value, block: Value) -> list[Any]:
    """Two vectors of 16 columns of float32 x [n_in], zero from `n_in` on."""
    mask = splat(b, b.icmp_signed("<", block, b.sdiv(n_in, index_of(BLOCK))))
    halves = []
    for half in range(2):
        offset = b.add(b.mul(block, index_of(4 * BLOCK)), index_of(4 * LANES * half))
        arguments = [pointer_at(b, x, offset, F32X16), ir.Constant(i32, 4), mask]
        arguments.append(constant(f32, 0.0))
        halves.append(call(b, "llvm.masked.load.v16f32.p0", F32X16, arguments))
    return halves


@intrinsic(prefer_literal=True)
def pack_row(
    typing: Typing,
    kind: Kind,
    x: Kind,
    n_in: Kind,
    n_blocks: Kind,
    activations: Kind,
    tokens: Kind,
    token: Kind,
) -> Intrinsic:
    """Pack the activations of one token.

    Args:
        x: address of float32 [n_in].
        n_blocks: blocks to write; columns from `n_in` on are zero.
        activations: address of the token's tile.
        tokens, token: how many tokens the tile has, and which one of them this is.
    """
    fmt = panel_format(kind.literal_value)

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        x, n_in, n_blocks, activations, tokens, token = args[1:]
        x, activations = as_address(b, x), as_address(b, activations)
        block_bytes = b.mul(tokens, index_of(ACTIVATION_BLOCK_BYTES))
        with cgutils.for_range(b, n_blocks) as loop:
            act = b.gep(activations, [b.mul(loop.index, block_bytes)])
            columns = _columns(b, x, n_in, loop.index)
            words = _Slots(act, tokens, token)
            if HAS_BYTE_DOTS:
                facts = b.gep(act, [b.mul(tokens, index_of(BLOCK))])
                _pack_integers(b, fmt, columns, words, _Slots(facts, tokens, token))
            else:
                _pack_floats(b, fmt, columns, words)
        return context.get_dummy_value()

    address = types.intp
    return types.void(kind, *[address] * 6), generate


@intrinsic(prefer_literal=True)
def pack_planes(
    typing: Typing,
    kind: Kind,
    x: Kind,
    n_in: Kind,
    n_blocks: Kind,
    planes: Kind,
    first: Kind,
    n_all: Kind,
) -> Intrinsic:
    """Pack the activations of the only token into planes.

    Args:
        x: address of float32 [n_in], which starts with block `first`.
        n_blocks: blocks to write; columns from `n_in` on are zero.
        planes: address of the codes of all blocks; the facts of all follow.
        n_all: blocks of the token.
    """
    fmt = panel_format(kind.literal_value)

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        x, n_in, n_blocks, planes, first, n_all = args[1:]
        x, planes = as_address(b, x), as_address(b, planes)
        facts = b.gep(planes, [b.mul(n_all, index_of(BLOCK))])
        with cgutils.for_range(b, n_blocks) as loop:
            block = b.add(first, loop.index)
            codes = b.gep(planes, [b.mul(block, index_of(BLOCK))])
            words = _Slots(codes, index_of(1), index_of(0))
            columns = _columns(b, x, n_in, loop.index)
            _pack_integers(b, fmt, columns, words, _Slots(facts, n_all, block))
        return context.get_dummy_value()

    return types.void(kind, *[types.intp] * 6), generate


CACHE_LINE, PAGE = 64, 4096
SMALL_BLOCKS = 8
"""Blocks whose fields are laid out one after the other, where a record has several blocks."""
SIGN_BITS = np.int32(-0x7F7F7F80)  # 0x80808080


def _spread_bits(builder: Builder, words: Value) -> Value:
    out = constant(i32, 0)
    for byte in range(4):
        bits = builder.lshr(words, constant(i32, byte))
        bits = builder.and_(bits, constant(i32, 0x11111111))
        # neighbours move together: pairs of bits, fours, all eight
        for shift, mask in ((3, 0x03030303), (6, 0x000F000F), (12, 0xFF)):
            bits = builder.or_(bits, builder.lshr(bits, constant(i32, shift)))
            bits = builder.and_(bits, constant(i32, mask))
        out = builder.or_(out, builder.shl(bits, constant(i32, 8 * byte)))
    return out


spread_bits = lanewise(_spread_bits, [I32x16], I32x16)
"""Bit 4 j + b of each lane moves to 8 b + j."""


@njit
def put_single_units(
    rows: Address,
    row_bytes: int,
    n_lanes: int,
    goal: Address,
    first: int,
    n_units: int,
    unit: int,
    flip: Any,
) -> None:
    """Units from `first` on, one after the other; a number of rows that is not known when compiling
    keeps LLVM from making vectors of them, which takes longer."""
    for i in range(first, n_units):
        to = goal + LANES * unit * i
        for lane in range(n_lanes):
            row = rows + lane * row_bytes
            if unit == 1:
                put_u8(to, lane, get_u8(row, i))
            elif unit == 2:
                put_u16(to, lane, get_u16(row, i))
            else:
                put_i32(to, lane, get_i32(row, i) ^ flip)


@njit
def put_units(
    rows: Address, row_bytes: int, n_lanes: int, goal: Address, n_units: int, unit: int, change: int
) -> None:
    """A field of one block of each row: unit 0 of all rows, then unit 1, ..."""
    n_words = n_units if unit == WORD else n_units // WORD
    if n_lanes < LANES or unit == 2:
        n_words = 0
    flip = SIGN_BITS if change == FLIP_SIGNS else np.int32(0)
    done = 0
    while done + 4 <= n_words:
        transpose_words(rows + WORD * done, row_bytes, goal + WORD * LANES * done, flip)
        if unit == 1:
            for i in range(done, done + 4):
                store_i32(goal, LANES * i, bytes_apart(load_i32(goal, LANES * i)))
        done += 4
    for i in range(done, n_words):
        words = xor_i32(load_column(rows + WORD * i, row_bytes), i32x16(flip))
        if unit == 1:
            words = bytes_apart(words)
        store_i32(goal, LANES * i, words)
    first = WORD // unit * n_words
    put_single_units(rows, row_bytes, n_lanes, goal, first, n_units, unit, flip)
    if change == SPREAD_BITS:
        for i in range(n_units):
            store_i32(goal, LANES * i, spread_bits(load_i32(goal, LANES * i)))


@njit
def lay_panel(job: Any, rows: Address, n_lanes: Count, n_more: Count, out: Address) -> None:
    """Up to 16 rows become a panel at `out`; rows and blocks that complete it become zero.

    The rows that follow are asked for one after the other, since the processor takes 16 rows that
    are read at once for no stream. Their pages have to be mapped by then: what is asked for in
    others the processor passes over.

    Args:
        job: a `FillJob` or a `LateJob`.
        n_more: rows of the matrix that follow.
    """
    ahead = rows + LANES * job.row_bytes
    end = ahead + min(LANES, n_more) * job.row_bytes
    page = ahead - ahead % PAGE + PAGE
    while page + 8 <= end:
        atomic_load(page, 0)
        page += PAGE
    row_blocks = job.row_bytes // job.block_bytes
    n_records = (row_blocks + job.record_blocks - 1) // job.record_blocks
    cleared = n_records * job.record_bytes
    if n_lanes < LANES:
        cleared = 0
    elif row_blocks < n_records * job.record_blocks:
        cleared -= job.record_bytes
    for i in range(cleared, n_records * job.record_bytes):
        put_u8(out, i, 0)
    step = SMALL_BLOCKS if job.record_blocks > 1 else 1
    line = ahead
    for first in range(0, row_blocks, step):
        last = min(first + step, row_blocks)
        stop = min(line + LANES * step * job.block_bytes, end)
        while line < stop:
            prefetch(line, 0)
            line += CACHE_LINE
        for index in range(job.n_planes):
            plane = read_plane(job.table, index)
            n, unit, change = plane.n_units, plane.unit_bytes, plane.change
            n_bytes = n * unit
            start = rows + first * job.block_bytes + plane.start
            goal = out + first // job.record_blocks * job.record_bytes + plane.record_start
            in_record = 0
            for _ in range(first, last):
                put_units(start, job.row_bytes, n_lanes, goal, n, unit, change)
                start += job.block_bytes
                goal += LANES * n_bytes
                in_record += 1
                if in_record == job.record_blocks:
                    in_record = 0
                    goal += job.record_bytes - job.record_blocks * LANES * n_bytes


SCALE_BYTES = 2
BLOCK_BYTES = SCALE_BYTES + BLOCK
GROUP_BLOCKS = LANES
"""Blocks whose sums fill a vector."""
ROWS = 4
"""Rows whose blocks are added up at a time: each sum waits for the sum of the block before."""
TOTALS_BYTES = 4 * ROWS
PIECE_BLOCKS = 256
"""Blocks of rows whose terms stay in memory until then."""
ROW_TERMS_BYTES = 2 * 4 * PIECE_BLOCKS
TERMS_BYTES = ROWS * ROW_TERMS_BYTES
PANEL_PREFETCH_BLOCKS = 16
"""How far ahead 16 rows ask for memory that are read at once, which the processor takes for no
stream."""

RECORD_BYTES = LAYOUTS["q8_0"].record_bytes
SCALES_OFFSET = LAYOUTS["q8_0"].offsets["d", 0]
HALF = lanes_of(i32, 8)


@njit
def make_panel(rows: Address, row_bytes: Count, n_rows: Count, out: Address) -> None:
    """Up to 16 rows become a panel at `out`; rows and blocks that complete it become zero."""
    n_blocks = row_bytes // BLOCK_BYTES
    n_records = (n_blocks + 1) // 2
    cleared = n_records * RECORD_BYTES
    if n_rows < LANES:
        cleared = 0
    elif n_blocks % 2:
        cleared -= RECORD_BYTES
    for i in range(cleared, n_records * RECORD_BYTES):
        put_u8(out, i, 0)
    line = rows + LANES * row_bytes
    for block in range(n_blocks):
        at = rows + block * BLOCK_BYTES
        end = rows + LANES * (row_bytes + (block + 1) * BLOCK_BYTES)
        while line < end:
            prefetch(line, 0)
            line += CACHE_LINE
        record, half = out + block // 2 * RECORD_BYTES, block % 2
        codes, scales = record + LANES * BLOCK * half, record + SCALES_OFFSET
        put_units(at + SCALE_BYTES, row_bytes, n_rows, codes, BLOCK // 4, 4, FLIP_SIGNS)
        scales += LANES * SCALE_BYTES * half
        put_units(at, row_bytes, n_rows, scales, 1, SCALE_BYTES, PLAIN)


def _added(b: Builder, x: Value, y: Value, first: list[int], second: list[int]) -> Value:
    """Sums of words of x (0 to 15) and of y (from 16 on): those in `first` + those in `second`."""
    return b.add(shuffled(b, x, y, first), shuffled(b, x, y, second))


def _block_sums(b: Builder, x: list[Any]) -> Value:
    """The sums of words 0 to 7, then of words 8 to 15, of each of 8 vectors, as one vector.

    Vector i has products of blocks 2 i and 2 i + 1. Its words are shown in quarters of four, |...|
    a quarter: a0 is a word of vector a = 0, b0 of vector b = 1 and so on. A sum of words is written
    as they are (a02 is a0 + a2):

        a         | a0 a1 a2 a3     | the same of quarters 1, 2 and 3: shuffles that stay in
        b         | b0 b1 b2 b3     | a quarter are the quick ones
        a, b      | a02 a13 b02 b13 |   first [0, 1, 4, 5] of (a, b), second [2, 3, 6, 7]
        ab, cd    | a b c d         |   first [0, 2, 4, 6] of (ab, cd), second [1, 3, 5, 7]

    Two vectors are left, with the sums of quarters of vectors 0 to 3 and of 4 to 7. A block has two
    quarters, 0 and 1 or 2 and 3, which the third step adds; the last one puts blocks in order:

        x[0]      | 0 2 4 6 | 0 2 4 6 | 1 3 5 7 | 1 3 5 7 |             (blocks, by quarter)
        x[1]      | 8 10 12 14 | 8 10 12 14 | 9 11 13 15 | 9 11 13 15 |
        sums      | 0 2 4 6 | 1 3 5 7 | 8 10 12 14 | 9 11 13 15 |
        result    | 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15 |
    """
    for items in (([0, 1, 4, 5], [2, 3, 6, 7]), ([0, 2, 4, 6], [1, 3, 5, 7])):
        masks = [in_quarters(part) for part in items]
        x = [_added(b, x[i], x[i + 1], masks[0], masks[1]) for i in range(0, len(x), 2)]
    even = [start + i for start in (0, 8, LANES, LANES + 8) for i in range(4)]
    sums = _added(b, x[0], x[1], even, [word + 4 for word in even])
    order = [8 * (i // 8) + 4 * (i % 2) + i % 8 // 2 for i in range(LANES)]
    return shuffled(b, sums, sums, order)


def _dot(b: Builder, codes: Value, x: Value) -> Value:
    """Signed bytes x signed bytes, + 128 times the sum of these where one factor is unsigned."""
    if HAS_SIGNED_BYTE_DOTS:
        return dot_of_signed_bytes(b, constant(i32, 0), codes, x)
    return dot_of_bytes(b, constant(i32, 0), flipped(b, codes), x)


def _products(b: Builder, row: Value, codes: Value, n_blocks: int) -> list[Any]:
    """The products of pairs of blocks, a vector each; what completes 16 blocks is zero."""

    def block(start: Value, size: int, i: int) -> Value:
        return ir.Constant(HALF, [0] * 8) if i >= n_blocks else load_at(b, start, size * i, HALF)

    weights = b.gep(row, [index_of(SCALE_BYTES)])
    products = []
    for i in range(0, n_blocks, 2):
        w, x = (
            joined(b, [block(start, size, j) for j in (i, i + 1)])
            for start, size in ((weights, BLOCK_BYTES), (codes, BLOCK))
        )
        products.append(_dot(b, w, x))
    return products + [constant(i32, 0)] * (GROUP_BLOCKS // 2 - len(products))


def _facts(b: Builder, start: Value, item: ir.Type, n_blocks: int) -> Value:
    """A fact of each block of activations; what completes 16 blocks is anything."""
    few = load_at(b, start, 0, ir.VectorType(item, n_blocks))
    lanes = [min(lane, n_blocks - 1) for lane in range(LANES)]
    return b.shuffle_vector(few, few, ir.Constant(lanes_of(i32), lanes))


def _put_group(b: Builder, row: Value, x: list[Any], terms: Value, n_blocks: int) -> None:
    """What up to 16 blocks add to a row's sum, as factors.

    Args:
        row: address of the blocks.
        x: addresses of codes, scales and starts of the activations.
        terms: address of a vector for the first factors; the others follow a piece's.
    """
    codes, scales, starts = x
    halves = ir.Constant(lanes_of(i16), [0] * LANES)
    for i in range(n_blocks):
        d = load_at(b, row, BLOCK_BYTES * i, i16)
        halves = b.insert_element(halves, d, ir.Constant(i32, i))
    sums = _block_sums(b, _products(b, row, codes, n_blocks))
    values = b.sitofp(b.add(sums, _facts(b, starts, i32, n_blocks)), F32X16)
    factors = b.fmul(half_bits_to_float(b, halves), _facts(b, scales, f32, n_blocks))
    store_at(b, values, terms, 0)
    store_at(b, factors, terms, 4 * PIECE_BLOCKS)


@intrinsic
def put_terms(
    typing: Typing, row: Kind, first: Kind, n_blocks: Kind, planes: Kind, n_all: Kind, terms: Kind
) -> Intrinsic:
    """What blocks of a row, times blocks of the only token, add to the row's sum: two factors each.

    Args:
        row: address of the blocks; what follows them is asked for, too.
        first, n_blocks: the first block's number in its row, and how many, up to PIECE_BLOCKS.
        planes: address of the packed activations (see `linear/panels.py`), of `n_all` blocks.
        terms: address of float32 [2, PIECE_BLOCKS].
    """

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        row, first, n_blocks, planes, n_all, terms = args
        row, planes, terms = (as_address(b, address) for address in (row, planes, terms))
        facts = b.gep(planes, [b.mul(n_all, index_of(BLOCK))])
        scales = b.gep(facts, [b.mul(n_all, index_of(4 * SCALE))])
        starts = b.gep(facts, [b.mul(n_all, index_of(4 * START))])

        def put(block: Any, n: int) -> None:
            def at(start: Value, number: Any, size: int) -> Value:
                return b.gep(start, [b.mul(number, index_of(size))])

            of_row, token = at(row, block, BLOCK_BYTES), b.add(first, block)
            for offset in range(0, n * BLOCK_BYTES, 64):
                emit_stream_prefetch(b, pointer_at(b, of_row, offset, i8))
            x = [at(planes, token, BLOCK), at(scales, token, 4), at(starts, token, 4)]
            _put_group(b, of_row, x, at(terms, block, 4), n)

        done = index_of(0)
        for n in (GROUP_BLOCKS, 4, 1):
            n_groups = b.sdiv(b.sub(n_blocks, done), index_of(n))
            with cgutils.for_range(b, n_groups) as loop:
                put(b.add(done, b.mul(loop.index, index_of(n))), n)
            done = b.add(done, b.mul(n_groups, index_of(n)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


@intrinsic
def add_terms(typing: Typing, terms: Kind, n_blocks: Kind, totals: Kind) -> Intrinsic:
    """Add the terms of ROWS rows to their sums, block after block.

    Args:
        terms: address of float32 [ROWS, 2, PIECE_BLOCKS].
        totals: address of float32 [ROWS].
    """

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        terms, n_blocks, totals = args
        terms, totals = as_address(b, terms), as_address(b, totals)
        sums = [cgutils.alloca_once_value(b, load_at(b, totals, 4 * i, f32)) for i in range(ROWS)]
        with cgutils.for_range(b, n_blocks) as loop:
            at = b.gep(terms, [b.mul(loop.index, index_of(4))])
            for i, total in enumerate(sums):
                start = i * ROW_TERMS_BYTES
                x, y = (load_at(b, at, start + 4 * PIECE_BLOCKS * j, f32) for j in range(2))
                b.store(call(b, "llvm.fma.f32", f32, [x, y, b.load(total)]), total)
        for i, total in enumerate(sums):
            store_at(b, b.load(total), totals, 4 * i)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@njit
def multiply_rows(
    rows: Address, row_bytes: Count, n_rows: Count, planes: Address, n_all: Count, totals: Address
) -> None:
    """Up to ROWS rows times the only token.

    Args:
        rows: their blocks.
        planes: the packed activations (see `linear/panels.py`), of `n_all` blocks.
        totals: address of float32 [ROWS] for the results.
    """
    terms = stack_memory(TERMS_BYTES)
    n_blocks = row_bytes // BLOCK_BYTES
    for i in range(ROWS):
        put_f32(totals, i, np.float32(0.0))
    for first in range(0, n_blocks, PIECE_BLOCKS):
        n = min(PIECE_BLOCKS, n_blocks - first)
        for i in range(n_rows):
            piece = rows + i * row_bytes + first * BLOCK_BYTES
            put_terms(piece, first, n, planes, n_all, terms + i * ROW_TERMS_BYTES)
        add_terms(terms, n, totals)
