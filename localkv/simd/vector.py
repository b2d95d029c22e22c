"""The vector types, and pieces of code generation that the instructions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

from localkv.simd.cpu_features import CPU_FEATURES, CPU_NAME
from localkv.simd.kinds import Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES


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
