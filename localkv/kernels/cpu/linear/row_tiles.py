"""Products of many tokens with rows as in the file, a part of their columns at a time.

All of a tile's tokens and rows do not fit the first-level cache where rows are long, so tiles meet
in pieces of columns that do. Between two pieces sums stay in memory, as the vectors that they are:
these are added up in the same order as those of `rows.multiply_rows`, and so are their lanes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.kernels.cpu.linear.rows import addresses, row_dots
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES
from localkv.simd.memory import on_stack
from localkv.simd.shuffle import joined
from localkv.simd.vector import constant, f32, i8, i32, i64, lanes_of

SUM_BYTES = 4 * LANES
"""Of a row's sums with a token."""


@intrinsic(prefer_literal=True)
def stack_memory(typing: Typing, n_bytes: Kind) -> Intrinsic:
    """The address of memory on the stack of the function."""
    size = n_bytes.literal_value

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        return on_stack(b, size, SUM_BYTES)

    return types.int64(n_bytes), generate


def _sums_at(b: Builder, start: Value, n: int) -> list[Any]:
    start = b.inttoptr(start, lanes_of(f32).as_pointer())
    return [b.gep(start, [ir.Constant(i64, i)]) for i in range(n)]


@intrinsic(prefer_literal=True)
def add_piece(
    typing: Typing,
    kind: Kind,
    n_rows: Kind,
    n_tokens: Kind,
    rows: Kind,
    row_bytes: Kind,
    x: Kind,
    x_bytes: Kind,
    n: Kind,
    sums: Kind,
    is_first: Kind,
) -> Intrinsic:
    """Add `n` columns of a tile of rows times a tile of tokens to their sums.

    Args:
        kind, n_rows, n_tokens: known when compiling, see `row_dots`.
        rows, x, sums: addresses, of sums of token after token, which are aligned.
        row_bytes, x_bytes: from row to row, and from token to token.
        is_first: sums are 0 before.
    """
    dots = row_dots(kind.literal_value)
    height, width = n_rows.literal_value, n_tokens.literal_value

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        rows, row_bytes, x, x_bytes, n, sums, is_first = args[3:]
        rows, x = (b.inttoptr(address, i8.as_pointer()) for address in (rows, x))
        kept = _sums_at(b, sums, height * width)
        slots = [cgutils.alloca_once(b, lanes_of(f32)) for _ in kept]
        zero = constant(f32, 0.0)
        starts = b.icmp_signed("!=", is_first, ir.Constant(i64, 0))
        for place, slot in zip(kept, slots, strict=True):
            b.store(b.select(starts, zero, b.load(place)), slot)
        row_at, x_at = addresses(b, rows, row_bytes, height), addresses(b, x, x_bytes, width)
        dots.add_tile(b, row_at, x_at, n, slots)
        for place, slot in zip(kept, slots, strict=True):
            b.store(b.load(slot), place)
        return context.get_dummy_value()

    return types.void(kind, n_rows, n_tokens, *[types.intp] * 7), generate


def _picked(b: Builder, x: Value, y: Value, items: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(lanes_of(i32, len(items)), items))


def folded_sums(b: Builder, vectors: list[Any]) -> Any:
    """The sums of lanes of 2 or 4 vectors, each as `arithmetic.folded_sum` has it."""
    quarters = []
    for x in vectors:
        for n in (8, 4):
            x = b.fadd(_picked(b, x, x, [*range(n)]), _picked(b, x, x, [*range(n, 2 * n)]))
        quarters.append(x)
    pairs = [
        b.fadd(_picked(b, x, y, [0, 1, 4, 5]), _picked(b, x, y, [2, 3, 6, 7]))
        for x, y in zip(quarters[::2], quarters[1::2], strict=True)
    ]
    both = pairs[0] if len(pairs) == 1 else joined(b, pairs)
    even = list(range(0, len(vectors) * 2, 2))
    return b.fadd(_picked(b, both, both, even), _picked(b, both, both, [i + 1 for i in even]))


@intrinsic(prefer_literal=True)
def put_tile(
    typing: Typing,
    n_rows: Kind,
    n_tokens: Kind,
    sums: Kind,
    out: Kind,
    out_stride: Kind,
    addend: Kind,
    addend_stride: Kind,
) -> Intrinsic:
    """Sums of a tile, and what is added to them, go to `out`; strides are bytes.

    Args:
        addend: an address, or 0.
    """
    height, width = n_rows.literal_value, n_tokens.literal_value

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        sums, out, out_stride, addend, addend_stride = args[2:]
        kept = _sums_at(b, sums, height * width)
        totals = [
            folded_sums(b, [b.load(place) for place in kept[i : i + height]])
            for i in range(0, len(kept), height)
        ]
        out = b.inttoptr(out, i8.as_pointer())
        item = lanes_of(f32, height).as_pointer()
        to = [b.bitcast(at, item) for at in addresses(b, out, out_stride, width)]
        is_added = b.icmp_signed("!=", addend, ir.Constant(i64, 0))
        with b.if_else(is_added, likely=False) as (then, otherwise):
            with then:
                more = b.inttoptr(addend, i8.as_pointer())
                more_at = addresses(b, more, addend_stride, width)
                for place, total, at in zip(to, totals, more_at, strict=True):
                    added = b.load(b.bitcast(at, item), align=4)
                    b.store(b.fadd(total, added), place, align=4)
            with otherwise:
                for place, total in zip(to, totals, strict=True):
                    b.store(total, place, align=4)
        return context.get_dummy_value()

    return types.void(n_rows, n_tokens, *[types.intp] * 5), generate
