"""The CPU's products with F32, F16 and BF16 matrices, which are read as in the file.

A value is its own code, so rows need no panels: SIMD lanes run along a row, values become float32
in registers, and all arithmetic is float32. Where CPUs multiply pairs of bfloats BF16 rows meet
activations that are rounded to BF16, as in ggml. A row's product with a token is added up in the
same order in tiles of every size, so it does not depend on the other tokens of the batch.

All of a tile's tokens and rows do not fit the first-level cache where rows are long, so tiles meet
in pieces of columns that do. Between two pieces sums stay in memory, as the vectors that they are:
these are added up in the same order as in `multiply_rows`, and so are their lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.kernels.cpu.linear.jobs import BFLOAT_PAIRS
from localkv.quant_formats import FORMATS
from localkv.simd import LANES
from localkv.simd.arithmetic import folded_sum
from localkv.simd.integer import dot_of_bfloats
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.memory import emit_stream_prefetch, on_stack
from localkv.simd.shuffle import joined
from localkv.simd.vector import constant, f32, i8, i32, i64, lanes_of, multiply_add


def _completed(
    b: Builder, row: Value, first: Value, n: Value, value_bytes: int, step: int
) -> Value:
    """The address of a copy of the row's last `n` values, from `first` on, and zeros after them."""
    kind = lanes_of(i8, step * value_bytes)  # stored at once, which an array is not
    copy = cgutils.alloca_once(b, kind)
    b.store(ir.Constant(kind, None), copy)
    copy = b.bitcast(copy, i8.as_pointer())
    size = ir.Constant(i64, value_bytes)
    cgutils.raw_memcpy(b, copy, b.gep(row, [b.mul(first, size)]), n, size)
    return copy


Load = Callable[[Any, Any], Any]
"""A vector of values at an i8*."""


@dataclass(frozen=True)
class RowDots:
    """How values of rows meet values of tokens.

    Attributes:
        step: values of a vector; both lie side by side.
        row_bytes, x_bytes: of a value.
        load, load_x: a vector of each.
        add: (b, values of a row, of a token, total <16 x float>) -> their products added to it.
    """

    step: int
    row_bytes: int
    x_bytes: int
    load: Load
    load_x: Load
    add: Callable[..., Any]

    def add_tile(
        self, b: Builder, rows: Sequence[Value], x: Sequence[Value], n: Value, sums: Sequence[Value]
    ) -> None:
        """Add products of `n` values of rows and tokens, at i8*, to sums of token after token.

        A row alone asks for memory ahead, the next rows'.
        """

        def add_products(row_at: list[Any], x_at: list[Any]) -> None:
            weights = [self.load(b, at) for at in row_at]
            for t, at in enumerate(x_at):
                values = self.load_x(b, at)
                for r, weight in enumerate(weights):
                    slot = sums[t * len(rows) + r]
                    b.store(self.add(b, weight, values, b.load(slot)), slot)

        step = ir.Constant(i64, self.step)
        steps, left = b.sdiv(n, step), b.srem(n, step)
        with cgutils.for_range(b, steps) as loop:
            offset = b.mul(loop.index, ir.Constant(i64, self.step * self.row_bytes))
            x_offset = b.mul(loop.index, ir.Constant(i64, self.step * self.x_bytes))
            if len(rows) == 1:
                emit_stream_prefetch(b, b.gep(rows[0], [offset]))
            add_products([b.gep(at, [offset]) for at in rows], [b.gep(at, [x_offset]) for at in x])
        with b.if_then(b.icmp_signed("!=", left, ir.Constant(i64, 0)), likely=False):
            last = b.sub(n, left)
            add_products(
                [_completed(b, at, last, left, self.row_bytes, self.step) for at in rows],
                [_completed(b, at, last, left, self.x_bytes, self.step) for at in x],
            )


def _load_pairs(b: Builder, address: Value) -> Any:
    return b.load(b.bitcast(address, lanes_of(i32).as_pointer()), align=1)


def row_dots(kind: str) -> RowDots:
    """The dots of a format, or of BFLOAT_PAIRS."""
    if kind == BFLOAT_PAIRS:
        return RowDots(2 * LANES, 2, 2, _load_pairs, _load_pairs, dot_of_bfloats_last)
    load, load_f32 = (FORMATS[name].part("cpu").load_values for name in (kind, "f32"))
    return RowDots(LANES, FORMATS[kind].block_bytes, 4, load, load_f32, multiply_add)


def dot_of_bfloats_last(b: Builder, x: Value, y: Value, total: Value) -> Any:
    return dot_of_bfloats(b, total, x, y)


def addresses(b: Builder, start: Value, stride: Value, n: int) -> list[Any]:
    """Addresses `stride` bytes apart."""
    return [b.gep(start, [b.mul(ir.Constant(i64, i), stride)]) for i in range(n)]


@intrinsic(prefer_literal=True)
def multiply_rows(
    typing: Typing,
    kind: Kind,
    n_rows: Kind,
    n_tokens: Kind,
    rows: Kind,
    row_bytes: Kind,
    x: Kind,
    x_bytes: Kind,
    n_in: Kind,
    out: Kind,
    n_out: Kind,
    addend: Kind,
    addend_stride: Kind,
) -> Intrinsic:
    """A tile of rows times a tile of tokens; `rows`, `x` and `out` are addresses.

    So is `addend`, of what is added, unless it is 0; from token to token are `x_bytes` bytes of x
    and `addend_stride` bytes of what is added.

    `kind`, `n_rows` and `n_tokens` are known when compiling.
    """
    dots = row_dots(kind.literal_value)
    height, width = n_rows.literal_value, n_tokens.literal_value

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        rows, row_bytes, x, x_bytes, n_in, out, n_out, addend, addend_stride = args[3:]
        byte, word = i8.as_pointer(), ir.Constant(i64, 4)
        rows, x, out = (b.inttoptr(address, byte) for address in (rows, x, out))
        index = [ir.Constant(i64, i) for i in range(max(height, width))]
        row_at = addresses(b, rows, row_bytes, height)
        x_at = addresses(b, x, x_bytes, width)
        slots = [cgutils.alloca_once(b, lanes_of(f32)) for _ in range(height * width)]
        for slot in slots:
            b.store(constant(f32, 0.0), slot)
        dots.add_tile(b, row_at, x_at, n_in, slots)
        for t in range(width):
            for r in range(height):
                lanes = b.load(slots[t * height + r])
                total = folded_sum(b, lanes)
                slot = cgutils.alloca_once_value(b, total)
                with b.if_then(b.icmp_signed("!=", addend, ir.Constant(i64, 0))):
                    where = b.add(addend, b.mul(index[t], addend_stride))
                    where = b.inttoptr(b.add(where, b.mul(index[r], word)), f32.as_pointer())
                    b.store(b.fadd(total, b.load(where, align=4)), slot)
                offset = b.mul(b.add(b.mul(index[t], n_out), index[r]), word)
                b.store(b.load(slot), b.bitcast(b.gep(out, [offset]), f32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(kind, n_rows, n_tokens, *[types.intp] * 9), generate


SUM_BYTES = 4 * LANES
"""Bytes of a row's sums with a token."""


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
