"""The worker that rounds activations to BF16, for rows of it as in the file (`linear/rows.py`).

Tokens lie one after the other, each completed by zeros (`jobs.bfloat_blocks`).
"""

from __future__ import annotations

from llvmlite import ir
from numba import cfunc
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.kernels.cpu.linear.jobs import BFLOAT_BLOCK_BYTES, PART_BLOCKS, PackJob
from localkv.kernels.cpu.linear.panels import F32X16, as_address, index_of, pointer_at, store_at
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK
from localkv.simd import LANES
from localkv.simd.integer import rounded_to_bfloats
from localkv.simd.kinds import (
    Address,
    Args,
    Builder,
    Count,
    Intrinsic,
    Kind,
    Signature,
    Target,
    Typing,
    Value,
)
from localkv.simd.memory import reader, take_next
from localkv.simd.vector import call, constant, f32, i32, i64, lanes_of, splat

read_pack_job = reader(PackJob)


def _columns(b: Builder, x: Value, n_in: Value, first: Value) -> Value:
    """16 of float32 x [n_in], zero from `n_in` on."""
    numbers = ir.Constant(lanes_of(i64), list(range(LANES)))
    mask = b.icmp_signed("<", numbers, splat(b, b.sub(n_in, first)))
    at = pointer_at(b, x, b.mul(first, index_of(4)), F32X16)
    args = [at, ir.Constant(i32, 4), mask, constant(f32, 0.0)]
    return call(b, "llvm.masked.load.v16f32.p0", F32X16, args)


@intrinsic
def round_row(typing: Typing, x: Kind, n_in: Kind, n_blocks: Kind, out: Kind) -> Intrinsic:
    """Round float32 x [n_in] at an address to `n_blocks` blocks, zero from `n_in` on."""

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        x, n_in, n_blocks, out = args
        x, out = as_address(b, x), as_address(b, out)
        with cgutils.for_range(b, n_blocks) as loop:
            for half in range(BLOCK // LANES):
                first = b.add(b.mul(loop.index, index_of(BLOCK)), index_of(half * LANES))
                values = rounded_to_bfloats(b, _columns(b, x, n_in, first))
                store_at(b, values, out, b.mul(first, index_of(2)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@cfunc("void(int64, int64)")
def pack(address: Address, thread: Count) -> None:
    """Round float32 activations (`PackJob`)."""
    job = read_pack_job(address)
    n_blocks, n_parts = job.n_blocks, job.n_parts
    while True:
        piece = take_next(address)
        if piece >= job.n_tokens * n_parts:
            break
        token, part = piece // n_parts, piece % n_parts
        first = part * PART_BLOCKS
        n = n_blocks - first if part == n_parts - 1 else PART_BLOCKS
        x = job.x + 4 * (token * job.n_in + first * BLOCK)
        to = job.packed + (token * n_blocks + first) * BFLOAT_BLOCK_BYTES
        round_row(x, job.n_in - first * BLOCK, n, to)
