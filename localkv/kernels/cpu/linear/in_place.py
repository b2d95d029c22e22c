"""Products with Q8_0 as it lies in the file: no copy is made when a model is loaded.

One token meets rows one after the other, so that memory is read from the first byte to the last:
several at once get 60 % of its speed. For more tokens a thread makes panels of rows in its cache. A
row's sums are the same either way, bit for bit: those of integers are exact, and blocks are added
up in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.kernels.cpu.linear.blocks import LAYOUTS
from localkv.kernels.cpu.linear.packing import (
    F32X16,
    SCALE,
    START,
    as_address,
    index_of,
    load_at,
    pointer_at,
    store_at,
)
from localkv.kernels.cpu.linear.row_tiles import stack_memory
from localkv.kernels.cpu.linear.units import put_units
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK, FLIP_SIGNS, LANES, PLAIN
from localkv.simd.byte_dots import dot_of_bytes, dot_of_signed_bytes, flipped
from localkv.simd.cpu_features import HAS_SIGNED_BYTE_DOTS
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
from localkv.simd.memory import emit_stream_prefetch, half_bits_to_float, prefetch, put_f32, put_u8
from localkv.simd.shuffle import in_quarters, joined, shuffled
from localkv.simd.vector import call, constant, f32, i8, i16, i32, lanes_of

SCALE_BYTES = 2
BLOCK_BYTES = SCALE_BYTES + BLOCK
GROUP_BLOCKS = LANES
"""Blocks whose sums fill a vector."""
ROWS = 4
"""Whose blocks are added up at a time: each sum waits for that of the block before."""
TOTALS_BYTES = 4 * ROWS
PIECE_BLOCKS = 256
"""Of rows, whose terms stay in memory until then."""
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
    for block in range(n_blocks):
        at = rows + block * BLOCK_BYTES
        if block % 2 == 0:
            ahead = at + PANEL_PREFETCH_BLOCKS * BLOCK_BYTES
            if block + PANEL_PREFETCH_BLOCKS >= n_blocks:
                ahead += (LANES - 1) * row_bytes  # the rows that follow
            for lane in range(LANES):
                prefetch(ahead, lane * row_bytes)
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

    Vector i has products of blocks 2 i and 2 i + 1. With its words in quarters of four, where a0
    is a word of vector a = 0, b0 of vector b = 1 and so on, |...| a quarter, and a sum of words is
    written as they are (a02 is a0 + a2):

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
    """Those of pairs of blocks, a vector each; what completes 16 blocks is zero."""

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
        terms: address of a vector for the first factors; the others are behind those of a piece.
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
    """What blocks of a row, times those of the only token, add to the row's sum: two factors each.

    Args:
        row: address of the blocks; what follows them is asked for, too.
        first, n_blocks: the first block's number in its row, and how many, up to PIECE_BLOCKS.
        planes: address of the packed activations (see `linear/packing.py`), of `n_all` blocks.
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
    rows: Address,
    row_bytes: Count,
    n_rows: Count,
    planes: Address,
    n_all: Count,
    totals: Address,
) -> None:
    """Up to ROWS rows times the only token.

    Args:
        rows: their blocks.
        planes: the packed activations (see `linear/packing.py`), of `n_all` blocks.
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
