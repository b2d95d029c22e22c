"""Products with formats whose codes take long to read: a record is unpacked once for many tokens.

An unpacked record is a block after the other: eight vectors of codes, as they are multiplied, then
the vectors of its scales and of its minima. It lies on the stack, in the first-level cache, as do
the sums of `GROUP_TOKENS` tokens, 16 floats each. Sums are the same bits as those of
`linear/tiles.py`, which adds up the same numbers in the same order.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.kernels.cpu.linear.job import ACTIVATION_BLOCK_BYTES
from localkv.kernels.cpu.linear.packing import (
    F32X16,
    I32X16,
    as_address,
    index_of,
    load_at,
    store_at,
)
from localkv.kernels.cpu.linear.tiles import (
    Sums,
    add_half,
    add_minima,
    multiplied_codes,
    opaque,
    put_sums,
)
from localkv.quant_formats.shared.cpu.panel_codes import (
    BLOCK_VECTORS,
    PanelFormat,
    Record,
    panel_format,
)
from localkv.quant_formats.shared.cpu.panel_layout import LANES
from localkv.simd.cpu_features import HAS_BYTE_DOTS
from localkv.simd.kinds import (
    Args,
    Builder,
    Intrinsic,
    Kind,
    Signature,
    Target,
    Typing,
    Value,
)
from localkv.simd.memory import on_stack
from localkv.simd.vector import constant, f32

GROUP_TOKENS = 64
"""Tokens that meet an unpacked record, a multiple of all tiles' sizes."""

SUM_BYTES = 4 * LANES
"""Of a token's sums, and of any vector."""


def unpacks(name: str) -> bool:
    """Whether records of a format are unpacked for many tokens."""
    return HAS_BYTE_DOTS and panel_format(name).is_costly


def _block_bytes(fmt: PanelFormat) -> int:
    n_scales = 1 + fmt.halves
    n_minima = 0 if fmt.minimum is None else n_scales
    return SUM_BYTES * (BLOCK_VECTORS + n_scales + n_minima)


@intrinsic(prefer_literal=True)
def record_memory(typing: Typing, kind: Kind) -> Intrinsic:
    """The address of an unpacked record, on the stack of the function."""
    fmt = panel_format(kind.literal_value)
    n_bytes = fmt.record_blocks * _block_bytes(fmt)

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        return on_stack(b, n_bytes, SUM_BYTES)

    return types.int64(kind), generate


@intrinsic
def sums_memory(typing: Typing) -> Intrinsic:
    """The address of the sums of `GROUP_TOKENS` tokens, on the stack of the function."""

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        return on_stack(b, GROUP_TOKENS * SUM_BYTES, SUM_BYTES)

    return types.int64(), generate


@intrinsic(prefer_literal=True)
def unpack_record(typing: Typing, kind: Kind, record: Kind, out: Kind) -> Intrinsic:
    fmt = panel_format(kind.literal_value)

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        at, out = (as_address(b, x) for x in args[1:])
        for block in range(fmt.record_blocks):
            record = Record(b, fmt.layout, opaque(b, at))
            vectors = multiplied_codes(b, fmt, record, block)
            vectors += fmt.scales(record, block) + fmt.minima(record, block)
            for i, vector in enumerate(vectors):
                store_at(b, vector, out, block * _block_bytes(fmt) + SUM_BYTES * i)
        return context.get_dummy_value()

    return types.void(kind, types.intp, types.intp), generate


@intrinsic(prefer_literal=True)
def multiply_record(
    typing: Typing, kind: Kind, tokens: Kind, record: Kind, activations: Kind, sums: Kind
) -> Intrinsic:
    """Add an unpacked record times a tile of tokens to their sums."""
    fmt = panel_format(kind.literal_value)
    n = tokens.literal_value
    n_scales = 1 + fmt.halves

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        record, activations, memory = (as_address(b, x) for x in args[2:])
        sums = Sums(b, n)
        for t in range(n):
            b.store(load_at(b, memory, SUM_BYTES * t, F32X16), sums.slots[t])
        with cgutils.for_range(b, index_of(fmt.record_blocks)) as loop:
            at = b.gep(record, [b.mul(loop.index, index_of(_block_bytes(fmt)))])
            act = b.gep(activations, [b.mul(loop.index, index_of(ACTIVATION_BLOCK_BYTES * n))])

            def vector(i: int, item: Any) -> Any:
                return load_at(b, at, SUM_BYTES * i, item)

            each, last = BLOCK_VECTORS // n_scales, _block_bytes(fmt) // SUM_BYTES
            for half in range(n_scales):
                codes = [vector(half * each + i, I32X16) for i in range(each)]
                scale = vector(BLOCK_VECTORS + half, F32X16)
                add_half(b, fmt, half, codes, scale, n, act, sums)
            minima = [vector(i, F32X16) for i in range(BLOCK_VECTORS + n_scales, last)]
            add_minima(b, minima, n, act, sums)
        for t in range(n):
            store_at(b, sums[t], memory, SUM_BYTES * t)
        return context.get_dummy_value()

    return types.void(kind, tokens, *[types.intp] * 3), generate


@intrinsic
def clear_sums(typing: Typing, sums: Kind, tokens: Kind) -> Intrinsic:
    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        memory = as_address(b, args[0])
        with cgutils.for_range(b, args[1]) as loop:
            store_at(b, constant(f32, 0.0), memory, b.mul(loop.index, index_of(SUM_BYTES)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def put_unpacked_sums(
    typing: Typing,
    sums: Kind,
    tokens: Kind,
    out: Kind,
    out_stride: Kind,
    n_rows: Kind,
    addend: Kind,
    addend_stride: Kind,
) -> Intrinsic:
    """Sums of some tokens, and what is added to them, go to `out` (see `tiles.multiply_tile`)."""

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        memory, tokens, out, out_stride, n_rows, addend, addend_stride = args
        memory, out = as_address(b, memory), as_address(b, out)
        with cgutils.for_range(b, tokens) as loop:
            sums = Sums(b, 1)
            total = load_at(b, memory, b.mul(loop.index, index_of(SUM_BYTES)), F32X16)
            b.store(total, sums.slots[0])
            to = b.gep(out, [b.mul(loop.index, out_stride)])
            more = b.add(addend, b.mul(loop.index, addend_stride))
            is_added = b.icmp_signed("!=", addend, index_of(0))
            more = b.select(is_added, more, index_of(0))
            put_sums(b, sums, 1, to, out_stride, n_rows, more, addend_stride)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7), generate
