"""Products with Q8_0 as it lies in the file: no copy is made when a model is loaded.

One token meets rows one after the other, so that memory is read from the first byte to the last.
For more tokens a thread makes panels of rows in its cache. A row's sums are the same either way,
bit for bit: those of integers are exact, and blocks are added up in the same order.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.formats.cpu.panel_layout import BLOCK, FLIP_SIGNS, LANES, PLAIN
from localkv.kernels.cpu.linear.blocks import LAYOUTS
from localkv.kernels.cpu.linear.packing import (
    F32X16,
    I32X16,
    SCALE,
    START,
    as_address,
    index_of,
    load_at,
    pointer_at,
    total_of,
)
from localkv.kernels.cpu.linear.units import put_units
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
from localkv.simd.memory import emit_prefetch, half_bits_to_float, prefetch, put_u8
from localkv.simd.shuffle import in_quarters, joined, shuffled
from localkv.simd.vector import call, constant, f32, i8, i16, i32, lanes_of

SCALE_BYTES = 2
BLOCK_BYTES = SCALE_BYTES + BLOCK
GROUP_BLOCKS = 16
"""Blocks whose sums fill a vector."""
PREFETCH_BYTES = 4096
"""How far ahead a row asks for memory: prefetching by the processor ends with a page of 4 KiB."""
PANEL_PREFETCH_BLOCKS = 16
"""The same where 16 rows are read at once, which the processor takes for no stream."""

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


def _group_terms(
    b: Builder, row: Value, codes: Value, scales: Value, starts: Value
) -> tuple[Any, Any]:
    """What 16 blocks add to a row's sum, as two vectors of factors.

    Args:
        row: address of the blocks.
        codes, scales, starts: those of the activations.
    """
    products = []
    halves = ir.Constant(lanes_of(i16), [0] * LANES)
    for i in range(GROUP_BLOCKS):
        d = load_at(b, row, BLOCK_BYTES * i, i16)
        halves = b.insert_element(halves, d, ir.Constant(i32, i))
    for i in range(0, GROUP_BLOCKS, 2):
        pair = [load_at(b, row, BLOCK_BYTES * j + SCALE_BYTES, HALF) for j in (i, i + 1)]
        products.append(_dot(b, joined(b, pair), load_at(b, codes, BLOCK * i, I32X16)))
    sums = b.add(_block_sums(b, products), load_at(b, starts, 0, I32X16))
    factors = b.fmul(half_bits_to_float(b, halves), load_at(b, scales, 0, F32X16))
    return b.sitofp(sums, F32X16), factors


def _block_terms(
    b: Builder, row: Value, codes: Value, scale: Value, start: Value
) -> tuple[Any, Any]:
    """The same of one block."""
    nothing = ir.Constant(HALF, [0] * 8)
    w, x = (joined(b, [load_at(b, *at, HALF), nothing]) for at in ((row, SCALE_BYTES), (codes, 0)))
    total = b.add(total_of(b, _dot(b, w, x), "add", i32), load_at(b, start, 0, i32))
    halves = ir.Constant(lanes_of(i16), [0] * LANES)
    halves = b.insert_element(halves, load_at(b, row, 0, i16), ir.Constant(i32, 0))
    d = b.extract_element(half_bits_to_float(b, halves), ir.Constant(i32, 0))
    return b.sitofp(total, f32), b.fmul(d, load_at(b, scale, 0, f32))


def _fused(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x * y + z, rounded once."""
    return call(b, "llvm.fma.f32", f32, [x, y, z])


def _prefetch_group(b: Builder, row: Value) -> None:
    for offset in range(0, GROUP_BLOCKS * BLOCK_BYTES, 64):
        emit_prefetch(b, pointer_at(b, row, PREFETCH_BYTES + offset, i8))


@intrinsic
def multiply_row(typing: Typing, row: Kind, n_blocks: Kind, planes: Kind, n_all: Kind) -> Intrinsic:
    """A row times the only token -> float32.

    Args:
        row: address of its blocks; what follows it is asked for, too.
        planes: address of the packed activations (see `linear/packing.py`), of `n_all` blocks.
    """

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        row, n_blocks, planes, n_all = args
        row, planes = as_address(b, row), as_address(b, planes)
        facts = b.gep(planes, [b.mul(n_all, index_of(BLOCK))])
        scales = b.gep(facts, [b.mul(n_all, index_of(4 * SCALE))])
        starts = b.gep(facts, [b.mul(n_all, index_of(4 * START))])
        total = cgutils.alloca_once_value(b, ir.Constant(f32, 0.0))

        def at(block: Any) -> list[Any]:
            sizes = ((row, BLOCK_BYTES), (planes, BLOCK), (scales, 4), (starts, 4))
            return [b.gep(start, [b.mul(block, index_of(size))]) for start, size in sizes]

        n_groups = b.sdiv(n_blocks, index_of(GROUP_BLOCKS))
        with cgutils.for_range(b, n_groups) as loop:
            places = at(b.mul(loop.index, index_of(GROUP_BLOCKS)))
            _prefetch_group(b, places[0])
            values, factors = _group_terms(b, *places)
            for i in range(GROUP_BLOCKS):
                value, factor = (
                    b.extract_element(x, ir.Constant(i32, i)) for x in (values, factors)
                )
                b.store(_fused(b, value, factor, b.load(total)), total)
        first = b.mul(n_groups, index_of(GROUP_BLOCKS))
        with cgutils.for_range(b, b.sub(n_blocks, first)) as loop:
            value, factor = _block_terms(b, *at(b.add(first, loop.index)))
            b.store(_fused(b, value, factor, b.load(total)), total)
        return b.load(total)

    return types.float32(*[types.intp] * 4), generate
