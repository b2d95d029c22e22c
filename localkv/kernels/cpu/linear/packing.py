"""Packing activations for the CPU's products with panels.

Where CPUs multiply bytes (`simd/byte_dots.py`) activations are rounded to 8 bits, 32 values to a
scale, as ggml does for quantised weights; otherwise they stay float32. They are packed for a tile
of T tokens, block after block of 32 columns:

    8 bits   T x 4 int8 for each 4 columns, then T each of SCALE (float32), START and SECOND_START
             (int32) or VALUE_SUMS (float32)
    float32  T floats for each column, then T sums of them, twice

Columns come in the order in which the format's codes have them (`PanelFormat.columns`).

For rows that are multiplied as they lie in the file (`linear/in_place.py`) the only token's 8 bits
are in planes instead: the codes of all blocks, then all scales, and the other three alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.kernels.cpu.linear.job import ACTIVATION_BLOCK_BYTES
from localkv.quant_formats.shared.cpu.panel_codes import PanelFormat, panel_format
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK, LANES
from localkv.simd.cpu_features import HAS_BYTE_DOTS
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.vector import call, constant, f32, i8, i32, i64, lanes_of, splat

F32X16, I32X16 = lanes_of(f32), lanes_of(i32)

SCALE, START, SECOND_START = range(3)
VALUE_SUMS = START, SECOND_START
"""What is known of a block in 8 bits besides its codes, a word each: its scale; for weights whose
codes are too large what integer products start with, -surplus * the sum of the codes; for those
with minima the sum of the values, scale * the sum of the codes. Both are of the first half and of
the second where these have scales of their own, else of all (and the second word is 0)."""


@dataclass(frozen=True)
class PackedBlock:
    """Where the words of a block lie that was packed for a tile of `tokens`: bytes from its start.

    A block in float32 has a value for each column in place of codes, and two sums after them.
    """

    tokens: int

    def column(self, index: int, token: int) -> int:
        """Of float32; `index` BLOCK is the sum, or with halves that of the first."""
        return 4 * (index * self.tokens + token)

    def codes(self, word: int, token: int) -> int:
        """Of 8 bits: the codes of columns 4 word to 4 word + 3."""
        return 4 * (word * self.tokens + token)

    def fact(self, name: int, token: int) -> int:
        """Of 8 bits: SCALE, START, SECOND_START or one of VALUE_SUMS."""
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


def total_of(b: Builder, x: Value, operation: str, item: ir.Type) -> Value:
    suffix = "f32" if item is f32 else "i32"
    if operation == "fadd":
        return call(b, "llvm.vector.reduce.fadd.v16f32", f32, [ir.Constant(f32, 0.0), x])
    return call(b, f"llvm.vector.reduce.{operation}.v16{suffix}", item, [x])


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
    tops = [total_of(b, call(b, "llvm.fabs.v16f32", F32X16, [v]), "fmax", f32) for v in x]
    top = b.select(b.fcmp_ordered(">", tops[0], tops[1]), tops[0], tops[1])
    # that maximum passes over NaN, and an integer can't be one
    is_nan = b.bitcast(b.fcmp_unordered("uno", *x), ir.IntType(LANES))
    is_nan = b.icmp_unsigned("!=", is_nan, ir.Constant(is_nan.type, 0))
    top = b.select(is_nan, ir.Constant(f32, float("nan")), top)
    scale = b.fdiv(top, ir.Constant(f32, 127.0))
    is_zero = b.fcmp_ordered("==", top, ir.Constant(f32, 0.0))
    inverse = b.fdiv(ir.Constant(f32, 127.0), top)
    inverse = splat(b, b.select(is_zero, ir.Constant(f32, 0.0), inverse))
    totals, halves = [], []
    for values in x:
        rounded = call(b, "llvm.rint.v16f32", F32X16, [b.fmul(values, inverse)])
        codes = b.fptosi(rounded, I32X16)
        totals.append(total_of(b, codes, "add", i32))
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
        values.store(b, total_of(b, part, "fadd", f32), BLOCK + half)


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
