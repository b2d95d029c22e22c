"""Packing activations for the CPU's products with panels.

With AVX512-VNNI activations are rounded to 8 bits, 32 values to a scale, as ggml does for
quantised weights; otherwise they stay float32. They are packed for a tile of T tokens, block after
block of 32 columns:

    8 bits   T x 4 int8 for each 4 columns, then T each of: scale (float32), -zero * sum of the
             codes of the first and the second half (int32; whole and 0 where a block has one
             scale), scale * sum of the codes (float32)
    float32  T floats for each column, then T sums
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.kernels.cpu.linear_blocks import PANEL_FORMATS, PanelFormat
from localkv.kernels.cpu.linear_job import ACTIVATION_BLOCK_BYTES, BLOCK
from localkv.kernels.cpu.panel_bytes import LANES
from localkv.simd.cpu_features import HAS_VNNI
from localkv.simd.vector import call, constant, f32, i8, i32, i64, lanes_of, splat

F32X16, I32X16 = lanes_of(f32), lanes_of(i32)


def index_of(value: int) -> Any:
    return ir.Constant(i64, value)


def pointer_at(builder: Any, address: Any, offset: Any, target: ir.Type) -> Any:
    """i8* plus an offset in bytes, as a pointer to `target`."""
    if isinstance(offset, int):
        offset = index_of(offset)
    return builder.bitcast(builder.gep(address, [offset]), target.as_pointer())


def load_at(builder: Any, address: Any, offset: Any, target: ir.Type) -> Any:
    return builder.load(pointer_at(builder, address, offset, target), align=1)


def store_at(builder: Any, value: Any, address: Any, offset: Any) -> None:
    builder.store(value, pointer_at(builder, address, offset, value.type), align=1)


def as_address(builder: Any, value: Any) -> Any:
    return builder.inttoptr(value, i8.as_pointer())


def _total(b: Any, x: Any, operation: str, item: ir.Type) -> Any:
    suffix = "f32" if item is f32 else "i32"
    if operation == "fadd":
        return call(b, "llvm.vector.reduce.fadd.v16f32", f32, [ir.Constant(f32, 0.0), x])
    return call(b, f"llvm.vector.reduce.{operation}.v16{suffix}", item, [x])


def _pack_integers(
    b: Any, fmt: PanelFormat, x: list[Any], act: Any, tokens: Any, token: Any
) -> None:
    """Two vectors of 16 columns of a token -> their place in a block of packed activations."""
    tops = [_total(b, call(b, "llvm.fabs.v16f32", F32X16, [v]), "fmax", f32) for v in x]
    top = b.select(b.fcmp_ordered(">", tops[0], tops[1]), tops[0], tops[1])
    scale = b.fdiv(top, ir.Constant(f32, 127.0))
    is_zero = b.fcmp_ordered("==", top, ir.Constant(f32, 0.0))
    inverse = b.fdiv(ir.Constant(f32, 127.0), top)
    inverse = splat(b, b.select(is_zero, ir.Constant(f32, 0.0), inverse))
    facts = b.gep(act, [b.mul(tokens, index_of(BLOCK))])
    totals = []
    for half, values in enumerate(x):
        rounded = call(b, "llvm.rint.v16f32", F32X16, [b.fmul(values, inverse)])
        codes = b.fptosi(rounded, I32X16)
        totals.append(_total(b, codes, "add", i32))
        words = b.bitcast(b.trunc(codes, lanes_of(i8)), lanes_of(i32, 4))
        for j in range(4):
            slot = b.add(b.mul(index_of(4 * half + j), tokens), token)
            word = b.extract_element(words, ir.Constant(i32, j))
            store_at(b, word, act, b.mul(slot, index_of(4)))
    both = b.add(*totals)
    zero = ir.Constant(i32, -fmt.zero)
    starts = totals if fmt.halves else [both, ir.Constant(i32, 0)]
    values = [scale, *(b.mul(zero, t) for t in starts), b.fmul(scale, b.sitofp(both, f32))]
    for i, value in enumerate(values):
        slot = b.add(b.mul(index_of(i), tokens), token)
        store_at(b, value, facts, b.mul(slot, index_of(4)))


def _pack_floats(b: Any, fmt: PanelFormat, x: list[Any], act: Any, tokens: Any, token: Any) -> None:
    for i in range(BLOCK):
        value = b.extract_element(x[i // LANES], ir.Constant(i32, i % LANES))
        slot = b.add(b.mul(index_of(i), tokens), token)
        store_at(b, value, act, b.mul(slot, index_of(4)))
    total = _total(b, b.fadd(*x), "fadd", f32)
    slot = b.add(b.mul(index_of(BLOCK), tokens), token)
    store_at(b, total, act, b.mul(slot, index_of(4)))


@intrinsic(prefer_literal=True)
def pack_row(
    typing: Any,
    kind: Any,
    x: Any,
    n_in: Any,
    n_blocks: Any,
    activations: Any,
    tokens: Any,
    token: Any,
) -> Any:
    """Pack the activations of one token.

    Args:
        x: address of float32 [n_in].
        n_blocks: blocks to write; columns from `n_in` on are zero.
        activations: address of the token's tile.
        tokens, token: how many tokens the tile has, and which one of them this is.
    """
    fmt = PANEL_FORMATS[kind.literal_value]

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, n_in, n_blocks, activations, tokens, token = args[1:]
        x, activations = as_address(b, x), as_address(b, activations)
        pack = _pack_integers if HAS_VNNI else _pack_floats
        n_full = b.sdiv(n_in, index_of(BLOCK))
        block_bytes = b.mul(tokens, index_of(ACTIVATION_BLOCK_BYTES))
        with cgutils.for_range(b, n_blocks) as loop:
            act = b.gep(activations, [b.mul(loop.index, block_bytes)])
            exists = b.icmp_signed("<", loop.index, n_full)
            mask = splat(b, exists)
            halves = []
            for half in range(2):
                offset = b.add(b.mul(loop.index, index_of(4 * BLOCK)), index_of(4 * LANES * half))
                pointer = pointer_at(b, x, offset, F32X16)
                align = ir.Constant(i32, 4)
                arguments = [pointer, align, mask, constant(f32, 0.0)]
                halves.append(call(b, "llvm.masked.load.v16f32.p0", F32X16, arguments))
            pack(b, fmt, halves, act, tokens, token)
        return context.get_dummy_value()

    address = types.intp
    return types.void(kind, *[address] * 6), generate
