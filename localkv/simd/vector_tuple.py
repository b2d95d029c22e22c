"""Tuples of vectors, which LLVM keeps in registers: the accumulators of small matrix products.

A tuple's length is known when compiling (query heads of a KV head, rows of a tile), so one source
covers products with vectors and with matrices. `index` and `stride` count floats.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

from localkv.simd.vector import (
    LANES,
    F32x16,
    I32x16,
    check_base,
    constant,
    f32,
    i32,
    lanes_of,
    multiply_add,
    pointer,
    splat,
)


def _literal(n: Any) -> int:
    if not isinstance(n, types.IntegerLiteral):
        raise RequireLiteralValue("the length of a tuple must be known when compiling")
    return int(n.literal_value)


@intrinsic(prefer_literal=True)
def zeros_f32(typing: Any, n: Any) -> Any:
    length = _literal(n)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.ArrayType(lanes_of(f32), length)
        return ir.Constant(kind, [constant(f32, 0.0)] * length)

    return types.UniTuple(F32x16, length)(n), generate


@intrinsic(prefer_literal=True)
def zeros_i32(typing: Any, n: Any) -> Any:
    length = _literal(n)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.ArrayType(lanes_of(i32), length)
        return ir.Constant(kind, [constant(i32, 0)] * length)

    return types.UniTuple(I32x16, length)(n), generate


@intrinsic(prefer_literal=True)
def load_tuple(typing: Any, base: Any, index: Any, stride: Any, n: Any) -> Any:
    """x[i] = 16 floats at index + i * stride."""
    check_base(base)
    length = _literal(n)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index, stride, _ = args
        out = ir.Constant(ir.ArrayType(lanes_of(f32), length), ir.Undefined)
        for i in range(length):
            where = pointer(context, builder, signature.args[0], array, index, f32, LANES)
            out = builder.insert_value(out, builder.load(where, align=1), i)
            index = builder.add(index, stride)
        return out

    return types.UniTuple(F32x16, length)(base, types.intp, types.intp, n), generate


@intrinsic
def store_tuple(typing: Any, base: Any, index: Any, stride: Any, x: Any) -> Any:
    """16 floats at index + i * stride = x[i]."""
    check_base(base)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index, stride, values = args
        for i in range(x.count):
            where = pointer(context, builder, signature.args[0], array, index, f32, LANES)
            builder.store(builder.extract_value(values, i), where, align=1)
            index = builder.add(index, stride)
        return context.get_dummy_value()

    return types.void(base, types.intp, types.intp, x), generate


@intrinsic
def fma_broadcast(typing: Any, acc: Any, v: Any, base: Any, index: Any, stride: Any) -> Any:
    """acc[i] += v * base[index + i * stride]: one column of a matrix times a vector."""
    check_base(base)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        acc_in, vector, array, index, stride = args
        out = acc_in
        for i in range(acc.count):
            where = pointer(context, builder, signature.args[2], array, index, f32)
            factor = splat(builder, builder.load(where, align=1))
            term = multiply_add(builder, vector, factor, builder.extract_value(acc_in, i))
            out = builder.insert_value(out, term, i)
            index = builder.add(index, stride)
        return out

    return acc(acc, F32x16, base, types.intp, types.intp), generate


@intrinsic
def fma_broadcast2(
    typing: Any, acc0: Any, acc1: Any, v0: Any, v1: Any, base: Any, index: Any, stride: Any
) -> Any:
    """acc0[i] += v0 * s and acc1[i] += v1 * s, s = base[index + i * stride] loaded once."""
    check_base(base)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, vectors = list(args[:2]), args[2:4]
        array, index, stride = args[4:]
        for i in range(acc0.count):
            where = pointer(context, builder, signature.args[4], array, index, f32)
            factor = splat(builder, builder.load(where, align=1))
            for j in range(2):
                old = builder.extract_value(sums[j], i)
                term = multiply_add(builder, vectors[j], factor, old)
                sums[j] = builder.insert_value(sums[j], term, i)
            index = builder.add(index, stride)
        return context.make_tuple(builder, signature.return_type, sums)

    pair = types.UniTuple(acc0, 2)
    return pair(acc0, acc0, F32x16, F32x16, base, types.intp, types.intp), generate


@intrinsic
def fma_each(typing: Any, acc: Any, x: Any, v: Any) -> Any:
    """acc[i] += x[i] * v."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, factors, v = args
        for i in range(acc.count):
            old = builder.extract_value(out, i)
            term = multiply_add(builder, builder.extract_value(factors, i), v, old)
            out = builder.insert_value(out, term, i)
        return out

    return acc(acc, acc, F32x16), generate


@intrinsic
def add_each(typing: Any, x: Any, y: Any) -> Any:
    """x[i] + y[i], also of integers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, other = args
        for i in range(x.count):
            terms = builder.extract_value(out, i), builder.extract_value(other, i)
            total = builder.fadd(*terms) if x.dtype == F32x16 else builder.add(*terms)
            out = builder.insert_value(out, total, i)
        return out

    return x(x, x), generate
