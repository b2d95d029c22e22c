"""The vector types, pieces of code generation that the instructions share, and tuples of vectors.

LLVM keeps a tuple in registers: the accumulators of small matrix products. Its length is known when
compiling (query heads of a KV head, rows of a tile), so one source covers products with vectors and
with matrices. `index` and `stride` count floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import RequireLiteralValue
from numba.core.types import IntegerLiteral
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic, models, register_model

from localkv.simd import LANES
from localkv.simd.cpu_features import CPU_FEATURES, CPU_NAME, HAS_AVX512
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value


def choose_cpu() -> None:
    """Let Numba compile for the CPU that intrinsics are made for, before it compiles anything."""
    numba.config.CPU_NAME, numba.config.CPU_FEATURES = CPU_NAME, CPU_FEATURES


choose_cpu()

f32 = ir.FloatType()
f16 = ir.HalfType()
i1, i8, i16, i32, i64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


def lanes_of(item: ir.Type, n: int = LANES) -> ir.VectorType:
    return ir.VectorType(item, n)


class Vector(types.Type):
    """A Numba type that is one LLVM vector."""

    def __init__(self, name: str, item: ir.Type) -> None:
        self.item = item
        self.llvm = lanes_of(item)
        super().__init__(name=name)

    def __reduce__(self) -> tuple[Callable[[str], Vector], tuple[str]]:
        return vector_named, (self.name,)


F32x16 = Vector("F32x16", f32)
I32x16 = Vector("I32x16", i32)
Mask16 = Vector("Mask16", i1)


def vector_named(name: str) -> Vector:
    """Called to unpickle a cached function; types must stay the same objects."""
    return {"F32x16": F32x16, "I32x16": I32x16, "Mask16": Mask16}[name]


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.llvm)


def constant(item: ir.Type, value: float) -> ir.Constant:
    """A vector constant, the same in all lanes."""
    return ir.Constant(lanes_of(item), [value] * LANES)


def splat(builder: Builder, x: Value) -> Value:
    """A scalar in all lanes."""
    undefined = ir.Constant(lanes_of(x.type), ir.Undefined)
    vector = builder.insert_element(undefined, x, ir.Constant(i32, 0))
    return builder.shuffle_vector(vector, undefined, constant(i32, 0))


def call(builder: Builder, name: str, result: ir.Type, args: Sequence[Any]) -> Value:
    """Call an LLVM intrinsic by name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def multiply_add(builder: Builder, x: Value, y: Value, z: Value) -> Value:
    """x * y + z, fused where the CPU can."""
    return call(builder, "llvm.fmuladd.v16f32", lanes_of(f32), [x, y, z])


def pointer(
    context: Target,
    builder: Builder,
    kind: Kind,
    base: Value,
    index: Value,
    item: ir.Type,
    n: int = 1,
) -> Value:
    """The address of item `index`, as a pointer to one item or to a vector of `n`."""
    target = item if n == 1 else lanes_of(item, n)
    if isinstance(kind, types.Array):
        base = context.make_array(kind)(context, builder, base).data
        base = builder.bitcast(base, item.as_pointer())
    else:
        base = builder.inttoptr(base, item.as_pointer())
    return builder.bitcast(builder.gep(base, [index]), target.as_pointer())


def check_base(kind: Any) -> None:
    if not isinstance(kind, (types.Array, types.Integer)):
        raise TypeError(f"an array or an address is needed, not {kind}")


def lanewise(emit: Callable[..., Any], args: Sequence[Any], result: Any) -> Any:
    """An intrinsic on values only: `emit(builder, *args)`, one to three of them."""
    kinds = tuple(args)

    def typed(given: tuple[Any, ...]) -> tuple[Any, Any]:
        def generate(
            context: Target, builder: Builder, signature: Signature, values: Value
        ) -> Value:
            return emit(builder, *values)

        return result(*kinds), generate

    # Numba reads the number of parameters off the function
    if len(kinds) == 1:

        @intrinsic
        def unary(typing: Typing, x: Kind) -> Intrinsic:
            return typed((x,))

        return unary
    if len(kinds) == 2:

        @intrinsic
        def binary(typing: Typing, x: Kind, y: Kind) -> Intrinsic:
            return typed((x, y))

        return binary

    @intrinsic
    def ternary(typing: Typing, x: Kind, y: Kind, z: Kind) -> Intrinsic:
        return typed((x, y, z))

    return ternary


MOST_SUMS = 16 if HAS_AVX512 else 8
"""Vectors of sums that stay in registers, with room for the factors."""


def literal_length(n: Any) -> int:
    if not isinstance(n, IntegerLiteral):
        raise RequireLiteralValue("the length of a tuple must be known when compiling")
    return int(n.literal_value)


@intrinsic(prefer_literal=True)
def zeros_f32(typing: Typing, n: Kind) -> Intrinsic:
    length = literal_length(n)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        kind = ir.ArrayType(lanes_of(f32), length)
        return ir.Constant(kind, [constant(f32, 0.0)] * length)

    return UniTuple(F32x16, length)(n), generate


@intrinsic(prefer_literal=True)
def load_tuple(typing: Typing, base: Kind, index: Kind, stride: Kind, n: Kind) -> Intrinsic:
    """x[i] = 16 floats at index + i * stride."""
    check_base(base)
    length = literal_length(n)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        array, index, stride, _ = args
        out = ir.Constant(ir.ArrayType(lanes_of(f32), length), ir.Undefined)
        for i in range(length):
            where = pointer(context, builder, signature.args[0], array, index, f32, LANES)
            out = builder.insert_value(out, builder.load(where, align=1), i)
            index = builder.add(index, stride)
        return out

    return UniTuple(F32x16, length)(base, types.intp, types.intp, n), generate


@intrinsic
def store_tuple(typing: Typing, base: Kind, index: Kind, stride: Kind, x: Kind) -> Intrinsic:
    """16 floats at index + i * stride = x[i]."""
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        array, index, stride, values = args
        for i in range(x.count):
            where = pointer(context, builder, signature.args[0], array, index, f32, LANES)
            builder.store(builder.extract_value(values, i), where, align=1)
            index = builder.add(index, stride)
        return context.get_dummy_value()

    return types.void(base, types.intp, types.intp, x), generate


@intrinsic
def fma_grid(
    typing: Typing, acc: Kind, v: Kind, base: Kind, index: Kind, step: Kind, stride: Kind
) -> Intrinsic:
    """acc[j * n + i] += v[j] * base[index + j * step + i * stride], a small outer product.

    The tuple `acc` is len(v) times n long; with step 0 a factor is loaded once for all of v.
    """
    check_base(base)
    n_vectors = v.count
    n = acc.count // n_vectors

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, vectors, array, index, step, stride = args
        for i in range(n):
            at = index
            for j in range(n_vectors):
                where = pointer(context, builder, signature.args[2], array, at, f32)
                factor = splat(builder, builder.load(where, align=1))
                old = builder.extract_value(out, j * n + i)
                term = multiply_add(builder, builder.extract_value(vectors, j), factor, old)
                out = builder.insert_value(out, term, j * n + i)
                at = builder.add(at, step)
            index = builder.add(index, stride)
        return out

    return acc(acc, v, base, types.intp, types.intp, types.intp), generate


@intrinsic(prefer_literal=True)
def load_grid(
    typing: Typing, base: Kind, index: Kind, step: Kind, stride: Kind, n_vectors: Kind, n: Kind
) -> Intrinsic:
    """x[j * n + i] = 16 floats at index + j * step + i * stride."""
    check_base(base)
    columns, rows = literal_length(n_vectors), literal_length(n)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        array, index, step, stride = args[:4]
        out = ir.Constant(ir.ArrayType(lanes_of(f32), columns * rows), ir.Undefined)
        for j in range(columns):
            at = index
            for i in range(rows):
                where = pointer(context, builder, signature.args[0], array, at, f32, LANES)
                out = builder.insert_value(out, builder.load(where, align=1), j * rows + i)
                at = builder.add(at, stride)
            index = builder.add(index, step)
        return out

    result = UniTuple(F32x16, columns * rows)
    return result(base, types.intp, types.intp, types.intp, n_vectors, n), generate


@intrinsic(prefer_literal=True)
def store_grid(
    typing: Typing, base: Kind, index: Kind, step: Kind, stride: Kind, n_vectors: Kind, x: Kind
) -> Intrinsic:
    """The inverse of `load_grid`."""
    check_base(base)
    columns = literal_length(n_vectors)
    rows = x.count // columns

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        array, index, step, stride, _, values = args
        for j in range(columns):
            at = index
            for i in range(rows):
                where = pointer(context, builder, signature.args[0], array, at, f32, LANES)
                builder.store(builder.extract_value(values, j * rows + i), where, align=1)
                at = builder.add(at, stride)
            index = builder.add(index, step)
        return context.get_dummy_value()

    return types.void(base, types.intp, types.intp, types.intp, n_vectors, x), generate


@intrinsic
def mul_add_all(typing: Typing, x: Kind, v: Kind, w: Kind) -> Intrinsic:
    """x[i] * v + w."""

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, v, w = args
        for i in range(x.count):
            term = multiply_add(builder, builder.extract_value(out, i), v, w)
            out = builder.insert_value(out, term, i)
        return out

    return x(x, F32x16, F32x16), generate


@intrinsic
def fma_each(typing: Typing, acc: Kind, x: Kind, v: Kind) -> Intrinsic:
    """acc[j * n + i] += x[j * n + i] * v[j]."""
    n = acc.count // v.count

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, factors, vectors = args
        for place in range(acc.count):
            old = builder.extract_value(out, place)
            factor = builder.extract_value(factors, place)
            vector = builder.extract_value(vectors, place // n)
            out = builder.insert_value(out, multiply_add(builder, factor, vector, old), place)
        return out

    return acc(acc, acc, v), generate


@intrinsic
def add_each(typing: Typing, x: Kind, y: Kind) -> Intrinsic:
    """x[i] + y[i], also of integers."""

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, other = args
        for i in range(x.count):
            terms = builder.extract_value(out, i), builder.extract_value(other, i)
            total = builder.fadd(*terms) if x.dtype == F32x16 else builder.add(*terms)
            out = builder.insert_value(out, total, i)
        return out

    return x(x, x), generate
