"""The CPU's products with F32, F16 and BF16 matrices, which are read as in the file.

A value is its own code, so rows need no panels: SIMD lanes run along a row, values become float32
in registers, and all arithmetic is float32. A row's product with a token is added up in the same
order in tiles of every size, so it does not depend on the other tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.formats import FORMATS
from localkv.simd.arithmetic import folded_sum
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES
from localkv.simd.memory import emit_prefetch
from localkv.simd.vector import constant, f32, i8, i64, lanes_of, multiply_add

PREFETCH_BYTES = 8192
"""How far ahead one row with one token asks for memory, across the end of the row: prefetching by
the processor ends with a page of 4 KiB, which is a row of 2048 values."""


def _loader(name: str) -> Callable[[Any, Any], Any]:
    return cast(Callable[[Any, Any], Any], FORMATS[name].part("cpu_weight").load_values)


def _completed(b: Builder, row: Value, first: Value, n: Value, value_bytes: int) -> Value:
    """The address of a copy of the row's last `n` values, from `first` on, and zeros behind."""
    kind = ir.ArrayType(i8, LANES * value_bytes)
    copy = cgutils.alloca_once(b, kind)
    b.store(ir.Constant(kind, None), copy)
    copy = b.bitcast(copy, i8.as_pointer())
    size = ir.Constant(i64, value_bytes)
    cgutils.raw_memcpy(b, copy, b.gep(row, [b.mul(first, size)]), n, size)
    return copy


@intrinsic(prefer_literal=True)
def multiply_rows(
    typing: Typing,
    kind: Kind,
    n_rows: Kind,
    n_tokens: Kind,
    rows: Kind,
    row_bytes: Kind,
    x: Kind,
    n_in: Kind,
    out: Kind,
    n_out: Kind,
    addend: Kind,
    addend_stride: Kind,
) -> Intrinsic:
    """A tile of rows times a tile of tokens; `rows`, `x` and `out` are addresses.

    So is `addend`, of what is added, unless it is 0; from token to token `addend_stride` bytes.

    `kind`, `n_rows` and `n_tokens` are known when compiling.
    """
    name = kind.literal_value
    height, width = n_rows.literal_value, n_tokens.literal_value
    load, value_bytes = _loader(name), FORMATS[name].block_bytes
    load_f32 = _loader("f32")

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        rows, row_bytes, x, n_in, out, n_out, addend, addend_stride = args[3:]
        byte, word = i8.as_pointer(), ir.Constant(i64, 4)
        rows, x, out = (b.inttoptr(address, byte) for address in (rows, x, out))
        index = [ir.Constant(i64, i) for i in range(max(height, width))]
        row_at = [b.gep(rows, [b.mul(index[r], row_bytes)]) for r in range(height)]
        x_at = [b.gep(x, [b.mul(b.mul(index[t], n_in), word)]) for t in range(width)]
        slots = [cgutils.alloca_once(b, lanes_of(f32)) for _ in range(height * width)]
        for slot in slots:
            b.store(constant(f32, 0.0), slot)

        def add_products(row_at: list[Any], x_at: list[Any]) -> None:
            weights = [load(b, at) for at in row_at]
            for t, at in enumerate(x_at):
                values = load_f32(b, at)
                for r, weight in enumerate(weights):
                    slot = slots[t * height + r]
                    b.store(multiply_add(b, weight, values, b.load(slot)), slot)

        lanes = ir.Constant(i64, LANES)
        steps, left = b.sdiv(n_in, lanes), b.srem(n_in, lanes)
        with cgutils.for_range(b, steps) as loop:
            offset = b.mul(loop.index, ir.Constant(i64, LANES * value_bytes))
            x_offset = b.mul(loop.index, ir.Constant(i64, LANES * 4))
            if height == width == 1:
                emit_prefetch(b, b.gep(rows, [b.add(offset, ir.Constant(i64, PREFETCH_BYTES))]))
            add_products(
                [b.gep(at, [offset]) for at in row_at], [b.gep(at, [x_offset]) for at in x_at]
            )
        with b.if_then(b.icmp_signed("!=", left, ir.Constant(i64, 0)), likely=False):
            last = b.sub(n_in, left)
            add_products(
                [_completed(b, at, last, left, value_bytes) for at in row_at],
                [_completed(b, at, last, left, 4) for at in x_at],
            )
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

    return types.void(kind, n_rows, n_tokens, *[types.intp] * 8), generate
