"""The CPU's products of few tokens with F32, F16 and BF16 matrices, which are read as in the file.

A value is its own code, so rows need no panels: SIMD lanes run along a row, values become float32
in registers, and all arithmetic is float32. Many tokens are torch's business (`linear.py`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, prange
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.simd.compile_cache import CAN_CACHE
from localkv.simd.cpu_features import HAS_AVX512
from localkv.simd.memory import call_address, get_i64, half_bits_to_float, put_i64, take_next
from localkv.simd.vector import (
    LANES,
    constant,
    f32,
    i8,
    i16,
    i32,
    i64,
    lanes_of,
    multiply_add,
)

ROW_FORMATS = ("f32", "f16", "bf16")

MAX_TOKENS = 32
"""With more tokens it is faster to decode a tile and leave the product to torch."""

TILE_ROWS = 4 if HAS_AVX512 else 2
TILE_TOKENS = 4 if HAS_AVX512 else 2
"""As many sums as there are registers for."""

CHUNK_ROWS = 64
"""Rows that a thread takes at a time."""


def _values(b: Any, kind: str, address: Any) -> Any:
    """16 values of a row as float32."""
    item = i32 if kind == "f32" else i16
    bits = b.load(b.bitcast(address, lanes_of(item).as_pointer()), align=1)
    if kind == "f32":
        return b.bitcast(bits, lanes_of(f32))
    if kind == "f16":
        return half_bits_to_float(b, bits)
    return b.bitcast(b.shl(b.zext(bits, lanes_of(i32)), constant(i32, 16)), lanes_of(f32))


@intrinsic(prefer_literal=True)
def multiply_rows(
    typing: Any,
    kind: Any,
    n_rows: Any,
    n_tokens: Any,
    rows: Any,
    row_bytes: Any,
    x: Any,
    n_in: Any,
    out: Any,
    n_out: Any,
) -> Any:
    """A tile of rows times a tile of tokens; `rows`, `x` and `out` are addresses.

    `kind`, `n_rows` and `n_tokens` are known when compiling; `n_in` is a multiple of 16.
    """
    name = kind.literal_value.split()[0]
    height, width = n_rows.literal_value, n_tokens.literal_value
    value_bytes = 4 if name == "f32" else 2

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        rows, row_bytes, x, n_in, out, n_out = args[3:]
        byte, word = i8.as_pointer(), ir.Constant(i64, 4)
        rows, x, out = (b.inttoptr(address, byte) for address in (rows, x, out))
        index = [ir.Constant(i64, i) for i in range(max(height, width))]
        row_at = [b.gep(rows, [b.mul(index[r], row_bytes)]) for r in range(height)]
        x_at = [b.gep(x, [b.mul(b.mul(index[t], n_in), word)]) for t in range(width)]
        slots = [cgutils.alloca_once(b, lanes_of(f32)) for _ in range(height * width)]
        for slot in slots:
            b.store(constant(f32, 0.0), slot)
        steps = b.sdiv(n_in, ir.Constant(i64, LANES))
        with cgutils.for_range(b, steps) as loop:
            offset = b.mul(loop.index, ir.Constant(i64, LANES * value_bytes))
            weights = [_values(b, name, b.gep(at, [offset])) for at in row_at]
            offset = b.mul(loop.index, ir.Constant(i64, LANES * 4))
            for t, at in enumerate(x_at):
                values = _values(b, "f32", b.gep(at, [offset]))
                for r, weight in enumerate(weights):
                    slot = slots[t * height + r]
                    b.store(multiply_add(b, weight, values, b.load(slot)), slot)
        zero = ir.Constant(f32, 0.0)
        for t in range(width):
            for r in range(height):
                lanes = b.load(slots[t * height + r])
                # the order of the sum is free, or it would be one lane after the other
                total = b.call(
                    cgutils.get_or_insert_function(
                        b.module,
                        ir.FunctionType(f32, [f32, lanes_of(f32)]),
                        "llvm.vector.reduce.fadd.v16f32",
                    ),
                    [zero, lanes],
                    fastmath=("reassoc",),
                )
                offset = b.mul(b.add(b.mul(index[t], n_out), index[r]), word)
                b.store(total, b.bitcast(b.gep(out, [offset]), f32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(kind, n_rows, n_tokens, *[types.intp] * 6), generate


# What the worker reads from a job, an array of int64.
NEXT_CHUNK, X, N_TOKENS, N_IN, ROWS, ROW_BYTES, N_OUT, OUT = range(8)
JOB_SIZE = 8


def _multiplier(kind: str) -> Any:
    """The worker of a format. Numba's cache tells closures apart by `kind`."""

    @cfunc(types.void(types.int64, types.int64), cache=CAN_CACHE)
    def multiply(job: Any, thread: Any) -> None:
        n_tokens, n_in, n_out = get_i64(job, N_TOKENS), get_i64(job, N_IN), get_i64(job, N_OUT)
        row_bytes = get_i64(job, ROW_BYTES)
        while True:
            first = take_next(job + 8 * NEXT_CHUNK) * CHUNK_ROWS
            if first >= n_out:
                break
            last = min(first + CHUNK_ROWS, n_out)
            row = first
            while row < last:
                height = TILE_ROWS if row + TILE_ROWS <= last else 1
                rows = get_i64(job, ROWS) + row * row_bytes
                token = 0
                while token < n_tokens:
                    width = TILE_TOKENS if token + TILE_TOKENS <= n_tokens else 1
                    x = get_i64(job, X) + 4 * token * n_in
                    out = get_i64(job, OUT) + 4 * (token * n_out + row)
                    if height == 1:
                        width = 1
                        multiply_rows(kind, 1, 1, rows, row_bytes, x, n_in, out, n_out)
                    elif width == 1:
                        multiply_rows(kind, TILE_ROWS, 1, rows, row_bytes, x, n_in, out, n_out)
                    else:
                        multiply_rows(
                            kind, TILE_ROWS, TILE_TOKENS, rows, row_bytes, x, n_in, out, n_out
                        )
                    token += width
                row += height

    return multiply


@njit(types.void(*[types.int64] * 10), parallel=True, nogil=True, cache=CAN_CACHE)
def run_rows_product(
    multiply: Any,
    job: Any,
    n_threads: Any,
    x: Any,
    n_tokens: Any,
    n_in: Any,
    rows: Any,
    row_bytes: Any,
    n_out: Any,
    out: Any,
) -> None:
    """Fill in a job, for which `job` is memory, and run the worker `multiply`."""
    put_i64(job, NEXT_CHUNK, 0)
    put_i64(job, X, x)
    put_i64(job, N_TOKENS, n_tokens)
    put_i64(job, N_IN, n_in)
    put_i64(job, ROWS, rows)
    put_i64(job, ROW_BYTES, row_bytes)
    put_i64(job, N_OUT, n_out)
    put_i64(job, OUT, out)
    for i in prange(n_threads):
        call_address(multiply, (job, i))


@lru_cache
def rows_worker(name: str, source: str) -> int:
    """Address of a format's worker; compiles it, or loads it from the cache of `source`."""
    worker = _multiplier(f"{name} {source}")
    _COMPILED.append(worker)
    address: int = worker.address
    return address


_COMPILED: list[Any] = []
