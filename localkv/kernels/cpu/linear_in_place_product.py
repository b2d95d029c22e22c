"""One token times 16 rows of Q8_0 as they are in the file, without a panel in between.

Each row meets the activations by itself, and the sums of rows are put together in registers: a row
then has the very number of the panel's product, as sums of integers are exact.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.kernels.cpu.linear_in_place import BLOCK_BYTES, RECORD_BYTES
from localkv.kernels.cpu.linear_job import ACTIVATION_BLOCK_BYTES, BLOCK
from localkv.kernels.cpu.linear_packing import F32X16, I32X16, as_address, index_of, load_at
from localkv.kernels.cpu.panel_bytes import LANES
from localkv.simd.memory import half_bits_to_float
from localkv.simd.vector import call, constant, f32, i8, i16, i32, lanes_of, multiply_add, splat

HALF = lanes_of(i32, 8)
AHEAD = 10 * RECORD_BYTES
"""How far ahead rows are fetched; the hardware does not follow 16 of them."""


def _choose(b: Any, x: Any, y: Any, mask: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(I32X16, mask))


def _pair(b: Any, x: Any, y: Any, unit: int) -> Any:
    """Adds units of 1 or 2 words within 4: those of x and y come to lie beside each other."""
    low, high = [], []
    for quad in range(0, LANES, 4):
        for i in range(0, 2, unit):
            for source in (0, LANES):
                for j in range(unit):
                    low.append(source + quad + i + j)
                    high.append(source + quad + 2 + i + j)
    return b.add(_choose(b, x, y, low), _choose(b, x, y, high))


def _quads(x: tuple[int, int], y: tuple[int, int]) -> list[int]:
    """Two groups of 4 words of one vector, then two of another."""
    starts = (4 * x[0], 4 * x[1], LANES + 4 * y[0], LANES + 4 * y[1])
    return [start + i for start in starts for i in range(4)]


def _totals(b: Any, rows: list[Any]) -> list[Any]:
    """The sums of words 0 to 7, and of words 8 to 15, of 16 vectors, as two vectors."""
    pairs = [_pair(b, rows[i], rows[i + 1], 1) for i in range(0, LANES, 2)]
    fours = [_pair(b, pairs[i], pairs[i + 1], 2) for i in range(0, LANES // 2, 2)]
    eights = []
    for x, y in ((fours[0], fours[1]), (fours[2], fours[3])):
        even, odd = (_choose(b, x, y, _quads((i, i + 2), (i, i + 2))) for i in range(2))
        eights.append(b.add(even, odd))
    return [_choose(b, *eights, _quads((i, i + 2), (i, i + 2))) for i in range(2)]


@intrinsic
def multiply_rows_in_place(
    typing: Any,
    rows: Any,
    row_bytes: Any,
    next_rows: Any,
    activations: Any,
    out: Any,
    addend: Any,
) -> Any:
    """16 rows of whole records times one token; all are addresses but `row_bytes`.

    Args:
        next_rows: what is multiplied next, or `rows` again.
        activations: of one token, in 8 bits (see `linear_packing`).
        out: of float32 [16].
        addend: of what is added, or 0.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        rows, row_bytes, next_rows, act, out, addend = args
        act = as_address(b, act)
        total = cgutils.alloca_once(b, F32X16)
        b.store(constant(f32, 0.0), total)
        # four bases and three strides, for which there are registers
        strides = [b.mul(row_bytes, index_of(i)) for i in range(4)]
        bases = [b.mul(row_bytes, index_of(4 * i)) for i in range(4)]
        n_records = b.sdiv(row_bytes, index_of(RECORD_BYTES))
        signs = constant(i32, -0x7F7F7F80)
        with cgutils.for_range(b, n_records) as loop:
            offset = b.mul(loop.index, index_of(RECORD_BYTES))
            ahead = b.add(offset, index_of(AHEAD))
            beyond = b.icmp_signed(">=", ahead, row_bytes)
            source = b.select(beyond, b.sub(next_rows, row_bytes), rows)
            here = [as_address(b, b.add(b.add(rows, base), offset)) for base in bases]
            there = [as_address(b, b.add(b.add(source, base), ahead)) for base in bases]
            at = b.gep(act, [b.mul(loop.index, index_of(2 * ACTIVATION_BLOCK_BYTES))])
            both = ir.Constant(I32X16, list(range(LANES)))
            codes = [load_at(b, at, ACTIVATION_BLOCK_BYTES * i, HALF) for i in range(2)]
            x = b.bitcast(b.shuffle_vector(*codes, both), lanes_of(i8, 64))
            sums, scales = [], [ir.Constant(lanes_of(i16), [0] * LANES) for _ in range(2)]
            for lane in range(LANES):
                row = b.gep(here[lane // 4], [strides[lane % 4]])
                parts = [load_at(b, row, BLOCK_BYTES * i + 2, HALF) for i in range(2)]
                w = b.xor(b.shuffle_vector(*parts, both), signs)
                operands = [constant(i32, 0), b.bitcast(w, lanes_of(i8, 64)), x]
                sums.append(call(b, "llvm.x86.avx512.vpdpbusd.512", I32X16, operands))
                for i in range(2):
                    scale = load_at(b, row, BLOCK_BYTES * i, i16)
                    scales[i] = b.insert_element(scales[i], scale, ir.Constant(i32, lane))
                read, keep, data = (ir.Constant(i32, value) for value in (0, 3, 1))
                fetched = b.gep(there[lane // 4], [strides[lane % 4]])
                call(b, "llvm.prefetch.p0", ir.VoidType(), [fetched, read, keep, data])
            for i, product in enumerate(_totals(b, sums)):
                facts = ACTIVATION_BLOCK_BYTES * i + BLOCK
                start, d = load_at(b, at, facts + 4, i32), load_at(b, at, facts, f32)
                value = b.sitofp(b.add(product, splat(b, start)), F32X16)
                scale = b.fmul(half_bits_to_float(b, scales[i]), splat(b, d))
                b.store(multiply_add(b, value, scale, b.load(total)), total)
        with b.if_then(b.icmp_signed("!=", addend, index_of(0))):
            more = load_at(b, as_address(b, addend), 0, F32X16)
            b.store(b.fadd(b.load(total), more), total)
        pointer = b.inttoptr(out, F32X16.as_pointer())
        b.store(b.load(total), pointer, align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate
